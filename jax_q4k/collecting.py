"""Raises the garbage collector's thresholds while importing and tracing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from .process_wide import ProcessWide

__all__ = ["gc_throttled"]

#: Thresholds of the three generations, as for `gc.set_threshold`.
_THRESHOLDS = 50_000, 20, 100


def _raise_thresholds() -> tuple[int, int, int]:
    before = gc.get_threshold()
    gc.set_threshold(*_THRESHOLDS)
    return before


_throttled = ProcessWide(_raise_thresholds, lambda before: gc.set_threshold(*before))


@contextlib.contextmanager
def gc_throttled() -> Iterator[None]:
    """Context manager in which Python's garbage collector runs less often, in all threads.

    Imports and tracing create objects that stay alive; scanning them again and again takes a tenth
    of the time to the first token. The old thresholds are restored when the last block ends.
    """
    with _throttled.block():
        yield


seldom_collecting = gc_throttled  # deprecated name
