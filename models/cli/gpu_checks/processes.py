"""Runs checks in processes of their own, so that a crash or a hang is one line of the report."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile

from .checks import CHECKS
from .privacy import impersonal
from .results import Result, failed

#: Seconds after which a check is ended; the simulator needs longer than a GPU.
LIMIT, SIMULATED_LIMIT = 120, 900


def run(name: str, *, simulated: bool, seconds: float | None = None) -> Result:
    """Runs a check in a process; one that crashes, hangs or prints no result has failed."""
    limit = seconds or (SIMULATED_LIMIT if simulated else LIMIT)
    command = [sys.executable, "-m", "jax_q4k", "doctor", "--gpu-check", name]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [*command, *(["--dry-run"] if simulated else [])],
            env=os.environ | _environment(name, simulated),
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,  # so that children end with it
        )
        try:
            printed, _ = process.communicate(timeout=limit)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            printed, code = "", None
        finally:
            _end(process)
        said.seek(0)
        last = [impersonal(line) for line in said.read().splitlines() if line.strip()][-3:]
    if code is None:
        return failed(f"no result after {limit:.0f} seconds: the driver or a kernel hangs", *last)
    if code < 0:
        return failed(f"the process was ended by {signal.Signals(-code).name}", *last)
    try:
        result = Result.from_json(printed.splitlines()[-1])
    except (IndexError, ValueError):
        return failed(f"the process ended with exit code {code}", *last)
    return Result(result.status, impersonal(result.line), tuple(map(impersonal, result.details)))


def _environment(name: str, simulated: bool) -> dict[str, str]:
    """Returns changes of a check's environment."""
    if CHECKS[name].on_gpu and not simulated:
        # other processes may hold most of the memory
        return {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # most programs run once: compiling them takes longer than running them
    return {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
