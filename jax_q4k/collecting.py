"""Python's garbage collector, held back where many objects are made that stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from .process_wide import ProcessWide

__all__ = ["seldom_collecting"]

#: Objects made before the youngest are looked at, and how often they are before older ones are.
_SELDOM = 50_000, 20, 100


def _hold_back() -> tuple[int, int, int]:
    before = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    return before


_held_back = ProcessWide(_hold_back, lambda before: gc.set_threshold(*before))


@contextlib.contextmanager
def seldom_collecting() -> Iterator[None]:
    """The collector comes a tenth as often inside the block, in all threads.

    Imports and tracing make objects that stay; looking at all of them again and again takes a tenth
    of the time to the first token. The thresholds from before come back with the last block's end.
    """
    with _held_back.block():
        yield
