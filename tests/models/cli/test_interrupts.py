"""Signals that end a command."""

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time

import pytest

INTERRUPTED = """
import os, signal, sys
from jax_q4k.models import cli
from jax_q4k.models.cli.commands import generate, quantize
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


NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


@pytest.mark.slow("starts the command several times", quick=["SIGHUP"])
@pytest.mark.parametrize("name", NAMES)
def test_the_terminals_cursor_comes_back(name):
    """A progress bar hides the cursor; the process ends below the bar."""
    ours, theirs = pty.openpty()
    body = """
cli.commands.generate.load_model = interrupted
cli.main(["generate", "m", "--tokens", "1"])
"""
    done = run(body, name, stderr=theirs, stdout=subprocess.PIPE)
    os.close(theirs)
    assert done.returncode == 128 + getattr(signal, name)
    assert os.read(ours, 10_000).endswith(b"\x1b[?25h\r\r\n")
    os.close(ours)


@pytest.mark.slow("starts the command several times")
def test_the_terminals_mode_comes_back():
    """A line being typed has changed the mode: no echo."""
    body = """
import termios
def typing(*arguments):
    mode = termios.tcgetattr(2)
    mode[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(2, termios.TCSANOW, mode)
    assert termios.tcgetattr(2)[3] == mode[3]
    interrupted()
cli.commands.generate.load_model = typing
cli.main(['generate', 'm', '--tokens', '1'])
"""
    with in_terminal(body, "SIGTERM") as (process, theirs):
        before = termios.tcgetattr(theirs)
        assert process.wait(120) == 128 + signal.SIGTERM
        assert termios.tcgetattr(theirs) == before


@contextlib.contextmanager
def in_terminal(body, *arguments):
    """Starts a process with a controlling terminal; returns both."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", INTERRUPTED + body, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),
    )
    try:
        yield process, theirs
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        os.close(ours)


@pytest.mark.slow("starts the command several times")
def test_a_process_in_the_background_ends_and_leaves_the_mode_to_the_shell():
    """The system would stop a background process that changes the mode."""
    body = """
import termios
mode = termios.tcgetattr(2)
if child := os.fork():  # the shell, so to speak
    _, status = os.waitpid(child, os.WUNTRACED)
    assert not termios.tcgetattr(2)[3] & termios.ECHO
    os._exit(99 if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status))
os.setpgid(0, 0)

def typing(*arguments):
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    mode[3] &= ~termios.ECHO  # by the shell
    termios.tcsetattr(2, termios.TCSANOW, mode)
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    interrupted()
cli.commands.generate.load_model = typing
cli.main(['generate', 'm', '--tokens', '1'])
"""
    with in_terminal(body, "SIGTERM") as (process, _):
        assert process.wait(120) == 128 + signal.SIGTERM


def test_a_process_that_it_waits_for_ends_too():
    body = """
import subprocess
from jax_q4k.models.cli import interrupts
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
with interrupts.ending_at_once(), interrupts.killing(child):
    interrupted()
"""
    done = run(body, "SIGTERM", stdout=subprocess.PIPE)
    assert done.returncode == 128 + signal.SIGTERM
    assert not runs(int(done.stdout))


def runs(process: int) -> bool:
    """Whether a process still runs after a moment, since the system ends it asynchronously."""
    for _ in range(50):
        done = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True)
        if not done.stdout.strip() or done.stdout.startswith(b"Z"):
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow("starts the command several times", quick=["SIGINT"])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_written_in_part_is_removed(name, tmp_path):
    body = """
from jax_q4k import gguf, models

def quantize_file(source, target, *arguments, **options):
    tensors = {"t": gguf.TensorPieces("F32", (4,), interrupted)}
    gguf.write(target, {"general.architecture": "llama"}, tensors)

models.quantize_file = quantize_file
cli.main(["quantize", "demo", sys.argv[2]])
"""
    done = run(body, name, str(tmp_path / "out.gguf"), capture_output=True)
    assert done.returncode == 128 + getattr(signal, name) and done.stderr == b""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("starts the command several times")
def test_an_ignored_signal_stays_ignored(tmp_path):
    """nohup ignores the signal."""
    body = """
signal.signal(number, signal.SIG_IGN)
from jax_q4k import models
models.quantize_file = interrupted
cli.main(["quantize", "demo", sys.argv[2]])
"""
    done = run(body, "SIGHUP", str(tmp_path / "out.gguf"), capture_output=True)
    assert done.returncode == 1 and b"the signal did nothing" in done.stderr
