"""Settings of the whole process that blocks change, in whatever threads they are."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ProcessWide(Generic[T]):
    """A setting that is changed while any thread is inside a block."""

    def __init__(self, change: Callable[[], T], restore: Callable[[T], object]) -> None:
        """change: changes the setting and returns what it was, which `restore` gets."""
        self._change, self._restore = change, restore
        self._lock = threading.Lock()
        self._inside = 0  # blocks that have begun and not ended, of all threads
        self._before: list[T] = []

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Changes the setting inside; what was set before comes back with the last block's end."""
        with self._lock:
            if not self._inside:
                self._before = [self._change()]
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._restore(self._before.pop())
