"""Python's garbage collector, held back where many objects are made that stay."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__ = ["seldom_collecting"]

#: Objects made before the youngest are looked at, and how often they are before older ones are.
_SELDOM = 50_000, 20, 100

_lock = threading.Lock()
_inside = 0  # blocks that have begun and not ended, of all threads
_before = gc.get_threshold()


@contextlib.contextmanager
def seldom_collecting() -> Iterator[None]:
    """The collector comes a tenth as often inside the block, in all threads.

    Imports and tracing make objects that stay; looking at all of them again and again takes a tenth
    of the time to the first token. The thresholds from before come back with the last block's end.
    """
    global _inside, _before
    with _lock:
        if not _inside:
            _before = gc.get_threshold()
            gc.set_threshold(*_SELDOM)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                gc.set_threshold(*_before)
