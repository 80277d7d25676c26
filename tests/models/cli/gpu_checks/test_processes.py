"""Checks in processes of their own: results, crashes, hangs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from jax_q4k.models.cli.gpu_checks import processes
from jax_q4k.models.cli.gpu_checks.results import Result, ok


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Returns a function that runs the check `driver`, with a shell script as the command."""

    def run(script: str, *, simulated: bool = False, seconds: float | None = None) -> Result:
        command = tmp_path / "python"
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(command))
        return processes.run("driver", simulated=simulated, seconds=seconds)

    return run


def test_a_result(run):
    found = ok("a line", "a detail")
    assert run(f"echo said; echo '{found.as_json()}'") == found


def test_the_command_and_its_environment(run):
    about = '{"status": "ok", "line": "%s", "details": []}'
    asks = f"printf '{about}' \"$*, $JAX_PLATFORMS\""
    command = "-m jax_q4k doctor --gpu-check driver"
    assert run(asks).line == f"{command}, cpu"
    assert run(asks, simulated=True).line == f"{command} --dry-run, cpu"


def test_a_crash_names_the_signal_and_what_was_said_last(run):
    found = run("echo one >&2; echo 'mlp: matvec_q4_k' >&2; kill -SEGV $$")
    assert found.status == "failed" and "ended by SIGSEGV" in found.line
    assert found.details[-1] == "mlp: matvec_q4_k"


def test_a_hang_ends_with_its_children(run, tmp_path):
    started = time.monotonic()
    found = run(f"echo now >&2; sleep 60 & echo $! > {tmp_path}/pid; wait", seconds=0.3)
    assert time.monotonic() - started < 10
    assert found.status == "failed" and found.details == ("now",)
    assert "no result after 0 seconds: the driver or a kernel hangs" in found.line
    child = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")

    def ended() -> bool:
        return not child.exists() or child.read_text().split()[2] == "Z"

    while not ended() and time.monotonic() - started < 10:  # killed, but not yet dead
        time.sleep(0.01)
    assert ended()


@pytest.mark.parametrize("printed", ["", "hello", "[]", '{"status": "ok"}'])
def test_no_result(run, printed):
    found = run(f"echo '{printed}'; exit 3")
    assert found == Result("failed", "the process ended with exit code 3")


def test_reports_name_neither_the_user_nor_the_machine(run):
    home, host = Path.home(), os.uname().nodename
    found = run(f"echo {home}/x.py at {host}, {processes.sys.prefix}/lib >&2; exit 1")
    assert str(home) not in found.details[0] and host not in found.details[0]
    assert found.details[0].endswith("at HOST, PYTHON/lib")
