"""Handles signals that end a command: Ctrl-C, and those of shells and service managers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from jax_q4k.cache import atomic_files

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_children: set[subprocess.Popen[Any]] = set()  # killed when this process ends
_SHOW_CURSOR = b"\x1b[?25h\r\n"  # progress bars and status lines hide it


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Makes signals inside the block end the process, after cleaning up terminal and files.

    Restores the terminal and removes partial files.

    Raises no exception, because Python drops exceptions in finalizers, which run often in tracing.
    """
    end = functools.partial(_end, mode=_mode())
    with _handling(_SIGNALS, end):
        yield


@contextlib.contextmanager
def killing(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Kills a process if a signal ends this one inside the block, or the block raises."""
    _children.add(process)
    try:
        yield
    except BaseException:
        process.kill()
        raise
    finally:
        _children.discard(process)


@contextlib.contextmanager
def raising_at_prompt() -> Iterator[None]:
    """Lets Ctrl-C raise KeyboardInterrupt inside the block, which may only wait for input."""
    with _handling((signal.SIGINT,), signal.default_int_handler):
        yield


@dataclasses.dataclass
class Pressed:
    """Flag that records whether Ctrl-C was pressed."""

    once: bool = False


@contextlib.contextmanager
def noticing() -> Iterator[Pressed]:
    """Yields a Pressed that records Ctrl-C inside the block.

    A second Ctrl-C ends the process, as in `ending_at_once`.
    """
    pressed, mode = Pressed(), _mode()

    def notice(number: int, frame: FrameType | None) -> None:
        if pressed.once:
            _end(number, frame, mode)
        pressed.once = True

    with _handling((signal.SIGINT,), notice):
        yield pressed


def _mode() -> list[Any] | None:
    """Returns the terminal's mode, which line editing changes; None if there is no terminal."""
    try:
        return termios.tcgetattr(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError, termios.error):  # closed, or a file
        return None


def _end(number: int, frame: FrameType | None, mode: list[Any] | None) -> NoReturn:
    atomic_files.remove_partials()
    for process in list(_children):
        process.kill()
    if mode is not None:
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it would stop a background process
        with contextlib.suppress(OSError, termios.error):  # the terminal may be gone
            os.write(sys.stderr.fileno(), _SHOW_CURSOR)
            if os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp():  # else another process owns it
                termios.tcsetattr(sys.stderr.fileno(), termios.TCSANOW, mode)
    os._exit(128 + number)


@contextlib.contextmanager
def _handling(
    numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Sets a signal handler inside the block, in the main thread; keeps ignored signals ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    handled = [number for number, old in before.items() if old is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])
