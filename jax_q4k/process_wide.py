"""Changes a process-wide setting for as long as any thread is inside a `with` block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ProcessWide(Generic[T]):
    """A process-wide setting that stays changed while any thread is inside a `with` block."""

    def __init__(self, change: Callable[[], T], restore: Callable[[T], object]) -> None:
        """Takes `change`, which changes the setting and returns the old value for `restore`."""
        self._change, self._restore = change, restore
        self._lock = threading.Lock()
        self._inside = 0  # blocks in progress, in all threads
        self._before: list[T] = []

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Changes the setting inside the block; the last block to end restores the old value."""
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
