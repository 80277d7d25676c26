"""Makes Python's garbage collector run less often while importing and tracing, to save time."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from typing import Any

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


def __getattr__(name: str) -> Any:
    if name != "seldom_collecting":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    message = "jax_q4k.collecting.seldom_collecting is now gc_throttled"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return gc_throttled
