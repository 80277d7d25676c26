"""Records seconds of every test and memory of the processes that ran them: `--timings FILE`.

`tools.test_times` generates the tables of tests/README.md from the file.
"""

from __future__ import annotations

import json
import resource
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest


def own_megabytes() -> int:
    """Peak resident memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


class Timings:
    """Plugin of the reporting process; it sums up the reports of all workers."""

    def __init__(self, file: Path | None):
        self.file = file
        self.seconds: dict[str, float] = defaultdict(float)
        self.reasons: dict[str, str] = {}
        self.megabytes: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if reason := dict(report.user_properties).get("slow"):
            self.reasons[report.nodeid] = str(reason)

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
            found = {"megabytes": most, "seconds": rounded, "reasons": self.reasons}
            self.file.write_text(json.dumps(found, indent=0))
