"""pytest plugin that records which mutants' code each test runs, in the folder `$MUTANT_HITS`.

The switches themselves write the pairs of a mutant and a test, also from child processes. This
plugin resets them before every test, and writes how each test ended and how long it took.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator

import pytest


def reset() -> None:
    """Makes the switches of this process record mutants, and read `$MUTANT`, again."""
    if switch := sys.modules.get("jax_q4k.mutant_switch"):
        switch.reset()
    native = sys.modules.get("jax_q4k.native")
    if native is not None and native._load.cache_info().currsize:
        library: ctypes.CDLL | None = native._load()[0]
        if library is not None:
            library.jax_q4k_mutants_reset()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    reset()
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or not hasattr(report, "node"):
        with open(f"{os.environ['MUTANT_HITS']}/{os.getpid()}.tests", "a") as file:
            json.dump([report.nodeid, report.outcome, round(report.duration, 4)], file)
            file.write("\n")
