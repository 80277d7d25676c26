"""Signals that end a command."""

import os
import pty
import signal
import subprocess
import sys

import pytest

INTERRUPTED = """
import os, signal, sys
from jax_q4k.models import cli
from jax_q4k.models.cli import generate, quantize
number = getattr(signal, sys.argv[1])
default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
signal.signal(number, default)  # the tests themselves may run under nohup, which ignores it

def interrupted(*arguments, **options):
    os.kill(os.getpid(), number)
    raise AssertionError("the signal did nothing")
"""


def run(body, *arguments, **options):
    command = [sys.executable, "-W", "ignore", "-c", INTERRUPTED + body, *arguments]
    return subprocess.run(command, timeout=120, **options)


def test_the_terminals_cursor_comes_back():
    """A bar hides it, and the process ends under the bar."""
    ours, theirs = pty.openpty()
    body = "cli.generate.load_model = interrupted; cli.main(['generate', 'm', '--tokens', '1'])"
    done = run(body, "SIGINT", stderr=theirs, stdout=subprocess.PIPE)
    os.close(theirs)
    assert done.returncode == 128 + signal.SIGINT
    assert os.read(ours, 10_000).endswith(b"\x1b[?25h\r\r\n")
    os.close(ours)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_file_written_in_part_is_removed(name, tmp_path):
    body = """
from jax_q4k import gguf

def quantize_file(source, target, *arguments, **options):
    tensors = {"t": gguf.TensorPieces("F32", (4,), interrupted)}
    gguf.write(target, {"general.architecture": "llama"}, tensors)

cli.quantize.quantize_file = quantize_file
cli.main(["quantize", "in.gguf", sys.argv[2]])
"""
    done = run(body, name, str(tmp_path / "out.gguf"), capture_output=True)
    assert done.returncode == 128 + getattr(signal, name) and done.stderr == b""
    assert list(tmp_path.iterdir()) == []


def test_an_ignored_signal_stays_ignored(tmp_path):
    """As nohup asks."""
    body = """
signal.signal(number, signal.SIG_IGN)
cli.quantize.quantize_file = interrupted
cli.main(["quantize", "in.gguf", sys.argv[2]])
"""
    done = run(body, "SIGHUP", str(tmp_path / "out.gguf"), capture_output=True)
    assert done.returncode == 1 and b"the signal did nothing" in done.stderr
