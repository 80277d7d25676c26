"""Tests commands' reaction to signals: `python -m tools.signals [--model MODEL] [-n N] [FILE]`.

Sends SIGINT, SIGTERM and SIGHUP, in turn, at N random moments of phases of `jax-q4k generate`
(start, load, compile, generate) and of `jax-q4k quantize`, each in its own terminal. Expects an
exit code of 128 plus the signal's number, exit within a second, the terminal restored, its cursor
shown, and no traceback, process or partial file left. Prints each failure, and the times to exit
for each phase; writes them to FILE. Exit code 1: something failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import itertools
import os
import pty
import random
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

from jax_q4k import GGUFError, gguf

from .results import write_results

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WITHIN = 1.0  # seconds from a signal to exit
STARTED = 0.2  # seconds until the interpreter runs the command; before, it handles Ctrl-C itself
LONGEST = 120.0  # seconds that a command may take
_SCRIPT = Path(__file__).parent.parent / "models/cli/jax-q4k"
_SHOWN, _HIDDEN = b"\x1b[?25h", b"\x1b[?25l"


@dataclasses.dataclass(frozen=True)
class Phase:
    """A phase of a command's run.

    Attributes:
      arguments: of the command; MODEL stands for the model's path.
      begins: terminal output at its start.
      ends: terminal output after it; None: the phase lasts until the command exits.
      last: its last output: a signal after it may find the process exiting.
    """

    arguments: tuple[str, ...]
    begins: bytes
    ends: bytes | None
    last: bytes


_GENERATE = ("generate", "MODEL", "--tokens", "1,2,3", "-n", "100", "--cache-dtype", "float32")
_QUANTIZE = ("quantize", "MODEL", "out.gguf", "--type", "Q8_0", "--force")
_TIMES = b" s in total: "
_COMPILED = rb"Compiling.*\x1b\[\?25h"

PHASES = {
    "start": Phase(_GENERATE, b"", b"Loading", _TIMES),
    "load": Phase(_GENERATE, b"Loading", b"Compiling", _TIMES),
    "compile": Phase(_GENERATE, b"Compiling", _COMPILED, _TIMES),
    "generate": Phase(_GENERATE, _COMPILED, None, _TIMES),
    "quantize": Phase(_QUANTIZE, b"Quantizing", None, rb"%\) in "),
}


@dataclasses.dataclass
class Ended:
    """Outcome of a command: its exit code, seconds from the signal to exit, faults.

    code is as in a shell; None if the command exited before the signal.
    """

    code: int | None
    seconds: float
    faults: list[str]


class Command:
    """A command with its own terminal, folder, session and compilation cache.

    It is a context manager that ends the command.
    """

    def __init__(self, arguments: tuple[str, ...], model: Path) -> None:
        self._stack = contextlib.ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        for name in ("cache", "tmp", "work"):
            (self.folder / name).mkdir(mode=0o700)
        self._ours, theirs = pty.openpty()
        self._stack.callback(os.close, self._ours)
        self._theirs = theirs
        self._stack.callback(os.close, theirs)
        self._before = termios.tcgetattr(theirs)
        self.shown = b""
        changes = {
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "TMPDIR": str(self.folder / "tmp"),
            "TERM": "xterm",
            "PYTHONPATH": os.pathsep.join(filter(None, map(os.path.abspath, sys.path))),
            "PYTHONWARNINGS": "ignore",
        }
        args = [str(model) if argument == "MODEL" else argument for argument in arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT), *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=self.folder / "work",
            env=os.environ | changes,
            start_new_session=True,
            preexec_fn=lambda: _take_terminal(theirs),
        )
        self.started = time.monotonic()

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._stack.close()

    def read(self, seconds: float) -> None:
        """Reads the terminal's output for some seconds; there may be none."""
        if select.select([self._ours], [], [], max(0.0, seconds))[0]:
            with contextlib.suppress(OSError):  # the terminal has ended
                self.shown += os.read(self._ours, 1 << 16)

    def wait_for(self, pattern: bytes) -> bool:
        """Waits for output; returns False if the command exited before."""
        while not re.search(pattern, self.shown, re.DOTALL):
            if time.monotonic() - self.started > LONGEST:
                raise TimeoutError(f"{pattern!r} was not shown: {self.shown[-500:]!r}")
            if self.process.poll() is not None:
                self.read(0)
                return re.search(pattern, self.shown, re.DOTALL) is not None
            self.read(0.01)
        return True

    def wait(self, seconds: float) -> bool:
        """Waits for some seconds; returns False if the command exited before."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.process.poll() is None:
            self.read(min(left, 0.005))
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> Ended:
        """Sends a signal, and checks what the command leaves behind."""
        sent = time.monotonic()
        self.process.send_signal(number)
        over = not self.wait(LONGEST)
        seconds = time.monotonic() - sent
        if not over:
            return Ended(0, seconds, ["it goes on"])
        code, faults = self.process.returncode, self._left()
        code = 128 - code if code < 0 else code  # like a shell, for a process ended by a signal
        if code != 128 + number:
            faults.append(f"exit code {code}: {self.shown[-300:]!r}")
        if seconds > WITHIN:
            faults.append(f"ended after {seconds:.1f} s")
        return Ended(code, seconds, faults)

    def _left(self) -> list[str]:
        """Returns the faults in what an exited command left behind."""
        for _ in range(100):  # drains the terminal's buffer
            before = len(self.shown)
            self.read(0)
            if len(self.shown) == before:
                break
        faults = []
        if self.shown.rfind(_HIDDEN) > self.shown.rfind(_SHOWN):
            faults.append("the cursor is hidden")
        if termios.tcgetattr(self._theirs) != self._before:
            faults.append("the terminal's mode is another")
        if re.search(rb"Traceback|\x1b\[1;31merror", self.shown):
            faults.append(f"it complains: {self.shown[-300:]!r}")
        files = [path for name in ("tmp", "work") for path in (self.folder / name).rglob("*")]
        files += (self.folder / "cache").rglob("*.partial")
        files = [path for path in files if not _whole(path)]
        faults += [f"left {path.relative_to(self.folder)}" for path in files]
        return faults + [f"process {process} goes on" for process in _of_session(self.process.pid)]


def _take_terminal(terminal: int) -> None:
    """Prepares a new process: default signal handlers, and a controlling terminal."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def _whole(path: Path) -> bool:
    """Returns whether it is the complete output file: the signal came after it was written."""
    try:
        return path.name == "out.gguf" and bool(gguf.read_header(path).tensors)
    except GGUFError:
        return False


def _of_session(leader: int) -> list[int]:
    """Returns the running processes of a session, if /proc lists them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(path.parent.name))
    return found


@functools.cache
def lengths(arguments: tuple[str, ...], model: Path) -> dict[str, float]:
    """Returns the phases of a command, in order -> seconds that they take without a signal."""
    found = {}
    with Command(arguments, model) as command:
        began = time.monotonic()
        for name, phase in PHASES.items():
            if phase.arguments != arguments:
                continue
            command.wait_for(phase.begins)
            if phase.ends is None:
                command.wait(LONGEST)
            else:
                command.wait_for(phase.ends)
            found[name], began = time.monotonic() - began, time.monotonic()
    return found


def interrupted(phase: Phase, model: Path, number: signal.Signals, after: float) -> Ended:
    """Runs a command that gets a signal some seconds after a phase has begun."""
    with Command(phase.arguments, model) as command:
        if not (command.wait_for(phase.begins) and command.wait(after)):
            code = command.process.returncode
            wrong = [f"exit code {code} without a signal: {command.shown[-300:]!r}"] if code else []
            return Ended(None, 0.0, wrong)
        command.read(0)
        if re.search(phase.last, command.shown):
            return Ended(None, 0.0, [])
        return command.send(number)


def measure(name: str, model: Path, moments: int, seed: int) -> dict[str, Any]:
    """Sends signals at random moments of a phase, prints failures; returns figures."""
    phase, numbers = PHASES[name], itertools.cycle(SIGNALS)
    chance, lasts = random.Random(f"{name} {seed}"), lengths(phase.arguments, model)[name]
    first = 0.0 if phase.begins else STARTED
    seconds: list[float] = []
    failures: list[str] = []
    early = 0
    number, until = next(numbers), lasts
    while len(seconds) < moments and early <= 3 + moments:
        after = chance.uniform(first, max(first, until))
        ended = interrupted(phase, model, number, after)
        for fault in ended.faults:
            failures.append(f"{name}: {number.name} {after:.3f} s after it began: {fault}")
            print(failures[-1], flush=True)
        if ended.code is None:  # the machine is less busy than when the phase was measured
            early, until = early + 1, after
        else:
            seconds.append(ended.seconds)
            number = next(numbers)
    longest, middle = max(seconds, default=0.0), statistics.median(seconds or [0.0])
    print(
        f"{name:10} {lasts:8.2f} s long, {len(seconds):4} signals, {len(failures):4} failures; "
        f"seconds to the end: median {middle:.3f}, max {longest:.3f}",
        flush=True,
    )
    return {
        "phase": name,
        "lasts": lasts,
        "signals": len(seconds),
        "ended_before": early,
        "median": middle,
        "max": longest,
        "failures": failures,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m tools.signals",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="default: the demo, whose phases are short")
    parser.add_argument("-n", type=int, default=50, help="moments of each phase; default: 50")
    parser.add_argument("--phase", action="append", choices=PHASES, help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the moments; default: 0")
    parser.add_argument("file", nargs="?", type=Path)
    options = parser.parse_args(arguments)
    if options.model is None:
        from jax_q4k.models import demo_path

        options.model = demo_path()
    model = Path(options.model).resolve()
    rows = [measure(name, model, options.n, options.seed) for name in options.phase or PHASES]
    if options.file is not None:
        print(write_results(options.file, {"results": rows}))
    return 1 if any(row["failures"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
