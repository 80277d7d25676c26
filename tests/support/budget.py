"""A time limit for a test run: `--budget SECONDS`.

Tests that would start after the limit do not run. They are listed at the end and saved to a file;
the next run with a budget starts with them.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from .paths import cache_folder

_REASON = "no time left in the budget"


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--budget", type=float, metavar="SECONDS", help="begin no test after these")


def left_over() -> Path:
    """File with the names of tests for which earlier runs had no time."""
    return cache_folder() / "not-run.txt"


def _names_left_over() -> set[str]:
    file = left_over()
    return set(file.read_text().splitlines()) if file.exists() else set()


def first_those_left_over(items: list[pytest.Item]) -> None:
    """Moves tests for which an earlier run had no time to the front."""
    names = _names_left_over()
    items.sort(key=lambda item: item.nodeid not in names)


class Budget:
    """Plugin of every process that runs tests; the reporting one lists tests that did not run."""

    def __init__(self, seconds: float, reports: bool):
        self.deadline = time.monotonic() + seconds
        self.reports = reports
        self.run: set[str] = set()
        self.not_run: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self.deadline:
            pytest.skip(_REASON)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple) and _REASON in report.longrepr[2]:
            self.not_run.add(report.nodeid)
        elif report.when == "call":
            self.run.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.reports:
            return
        file, names = left_over(), _names_left_over() - self.run | self.not_run
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(sorted(names)))
        if self.not_run:
            terminalreporter.section(f"{len(self.not_run)} tests not run: {_REASON}")
            for test in sorted(self.not_run):
                terminalreporter.line(test)
