"""Seconds of every test and the memory of the processes that ran them: `--timings FILE`."""

from __future__ import annotations

import json
import resource
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

#: A worker that needs more could not run beside another on a machine of 8 GB.
MOST_MEGABYTES = 3072


def own_megabytes() -> int:
    """Most resident memory that this process had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


class Timings:
    """A plugin of the process that reports: it adds up what all workers tell."""

    def __init__(self, file: Path | None):
        self.file = file
        self.seconds: dict[str, float] = defaultdict(float)
        self.megabytes: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if found := getattr(node, "workeroutput", {}).get("megabytes"):
            self.megabytes[node.gateway.id] = found

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        most = self.megabytes or {"this process": own_megabytes()}
        each = ", ".join(f"{name} {megabytes:,} MB" for name, megabytes in sorted(most.items()))
        terminalreporter.line(f"most memory: {each}")
        if self.file:
            rounded = {test: round(seconds, 3) for test, seconds in self.seconds.items()}
            self.file.write_text(json.dumps({"megabytes": most, "seconds": rounded}, indent=0))
