"""Runs each mutant's tests in a fork of a process that has imported JAX and the packages.

`python -m tools.source_mutation.serving JOBS OUTCOMES`, in the instrumented copy. JOBS has lines of
JSON: [number, [node ids], seconds]. Each outcome is written to OUTCOMES: {"mutant", "killed_by",
"tests", "seconds"}. `killed_by` is a test's node id, followed by "timeout" or "crash" if no
assertion failed, or empty.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from . import recording

AT_ONCE = 2
_PRELOADED = ("hypothesis", "numpy", "jax", "flax.nnx", "gguf", "jax_q4k", "jax_q4k.models")


class Noting:
    """A pytest plugin that writes the running test's node id to a file."""

    def __init__(self, log: str):
        self.log = log

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        Path(self.log).write_text(nodeid)


def main() -> None:
    jobs = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for name in _PRELOADED:
        importlib.import_module(name)
    running: dict[int, dict[str, Any]] = {}
    slots = [tempfile.mkdtemp(prefix="mutant-slot-") for _ in range(AT_ONCE)]
    with open(sys.argv[2], "a") as outcomes:
        while jobs or running:
            while jobs and len(running) < AT_ONCE:
                number, tests, seconds = jobs.pop(0)
                slot = next(s for s in slots if s not in {r["slot"] for r in running.values()})
                job = _start(number, tests, slot)
                running[job["pid"]] = job | {"slot": slot, "limit": seconds, "mutant": number}
            for job in list(running.values()):
                if outcome := _outcome(job):
                    del running[job["pid"]]
                    outcomes.write(json.dumps(outcome) + "\n")
                    outcomes.flush()
            time.sleep(0.05)
    for slot in slots:
        shutil.rmtree(slot, ignore_errors=True)


def _start(number: int, tests: list[str], slot: str) -> dict[str, Any]:
    """Forks a process in its own group that runs the tests with the mutant switched on."""
    log = f"{slot}/test"
    Path(log).write_text("")
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            os.setsid()
            status = _run(number, tests, slot, log)
        finally:
            os._exit(status)
    return {"pid": pid, "log": log, "started": time.monotonic(), "tests": len(tests)}


def _run(number: int, tests: list[str], slot: str, log: str) -> int:
    """Returns the exit status of pytest, which stops at the first failing test."""
    temporary = tempfile.mkdtemp(dir=slot)
    _copy_tests_cache(temporary)
    os.environ |= {"MUTANT": str(number), "XDG_CACHE_HOME": temporary, "TMPDIR": temporary}
    tempfile.tempdir = None
    recording.reset()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], [Noting(log)]))


def _copy_tests_cache(folder: str) -> None:
    """Copies cached results of earlier compilations, so that a mutant cannot corrupt them."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jax-q4k-tests"
    for name, copy in (("programs", os.link), ("bytecode", os.link), ("machine-code", shutil.copy)):
        if (cache / name).is_dir():
            shutil.copytree(cache / name, f"{folder}/jax-q4k-tests/{name}", copy_function=copy)


def _outcome(job: dict[str, Any]) -> dict[str, Any] | None:
    """Returns how the mutant's process ended; None while it runs."""
    pid, status = os.waitpid(job["pid"], os.WNOHANG)
    seconds = time.monotonic() - job["started"]
    ended = ""
    if pid == 0:
        if seconds < job["limit"]:
            return None
        ended = " timeout"
    elif os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 70:
        ended = " crash"
    try:
        os.killpg(job["pid"], signal.SIGKILL)  # and processes that its tests have started
    except ProcessLookupError:
        pass
    if pid == 0:
        os.waitpid(job["pid"], 0)
    passed = not ended and os.WEXITSTATUS(status) == 0
    test = Path(job["log"]).read_text()
    shutil.rmtree(job["slot"])
    os.mkdir(job["slot"])
    return {
        "mutant": job["mutant"],
        "killed_by": "" if passed else (test or "collection") + ended,
        "tests": job["tests"],
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    main()
