"""Raises the garbage collector's thresholds while importing and tracing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from .process_wide import ProcessWide

__all__ = ["seldom_collecting"]

#: Thresholds of the three generations, as for `gc.set_threshold`.
_SELDOM = 50_000, 20, 100


def _hold_back() -> tuple[int, int, int]:
    before = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    return before


_held_back = ProcessWide(_hold_back, lambda before: gc.set_threshold(*before))


@contextlib.contextmanager
def seldom_collecting() -> Iterator[None]:
    """Context manager in which Python's garbage collector runs less often, in all threads.

    Imports and tracing create objects that stay alive; scanning them again and again takes a tenth
    of the time to the first token. The old thresholds are restored when the last block ends.
    """
    with _held_back.block():
        yield
