"""Signals that end a command: Ctrl-C, and what a shell or a service manager sends."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOW_CURSOR = b"\x1b[?25h\r\n"  # a bar or a status line hides it


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command; `code` is the exit code that shells expect of it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Ctrl-C ends the process inside the block, without an exception.

    Python drops one that is raised in a finalizer, and tracing a program runs many.
    """
    with _handling((signal.SIGINT,), _end):
        yield


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Signals raise `Interrupted` inside the block, so that files written in part are removed."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise Interrupted(number)

    with _handling(_SIGNALS, interrupt):
        yield


@contextlib.contextmanager
def raising_at_prompt() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt inside the block, which waits for a line and does no more."""
    with _handling((signal.SIGINT,), signal.default_int_handler):
        yield


@dataclasses.dataclass
class Pressed:
    """Whether Ctrl-C was pressed."""

    once: bool = False


@contextlib.contextmanager
def noticing() -> Iterator[Pressed]:
    """Ctrl-C inside the block is only noticed, unless it was before.

    Then it ends the process at once, as inside of `ending_at_once`.
    """
    pressed = Pressed()

    def notice(number: int, frame: FrameType | None) -> None:
        if pressed.once:
            _end(number, frame)
        pressed.once = True

    with _handling((signal.SIGINT,), notice):
        yield pressed


def _end(number: int, frame: FrameType | None) -> NoReturn:
    if sys.stderr is not None and sys.stderr.isatty():
        os.write(sys.stderr.fileno(), _SHOW_CURSOR)
    os._exit(128 + number)


@contextlib.contextmanager
def _handling(
    numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handles signals inside the block, in the main thread only; ignored ones stay ignored."""
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
