"""Asynchronous copies in flight: they write shared memory late or at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .errors import PendingCopyFault
from .memory import SharedMemory
from .state import Mask


@dataclass
class _Copy:
    """A copy of some threads that nobody has waited for; arrays have one entry per thread."""

    threads: np.ndarray
    groups: np.ndarray
    places: np.ndarray
    size: int
    values: np.ndarray

    def split(self, ready: np.ndarray) -> tuple[_Copy, _Copy]:
        def part(which: np.ndarray) -> _Copy:
            threads, groups = self.threads[which], self.groups[which]
            return _Copy(threads, groups, self.places[which], self.size, self.values[which])

        return part(ready), part(~ready)


class Copies:
    """Copies in flight, and the number of groups that each thread has committed.

    Args:
      threads: function from a mask to the numbers of its threads, of which there are `count`.
    """

    def __init__(
        self, shared: SharedMemory, threads: Callable[[Mask], np.ndarray], count: int, late: bool
    ) -> None:
        self._shared, self._threads, self._late = shared, threads, late
        self._committed = np.zeros(count, np.int64)
        self._pending: list[_Copy] = []

    def start(self, mask: Mask, places: np.ndarray, size: int, values: np.ndarray) -> None:
        shared = self._shared
        shared.expect(places, size)
        if not self._late:
            shared.write(places, size, values)
        threads = self._threads(mask)
        self._pending.append(_Copy(threads, self._committed[threads], places, size, values))

    def commit(self, mask: Mask) -> None:
        self._committed[self._threads(mask)] += 1

    def wait(self, mask: Mask, allowed: int) -> None:
        """Waits until each thread has at most `allowed` groups in flight."""
        waiting = np.zeros(self._committed.size, bool)
        waiting[self._threads(mask)] = True
        left = []
        for copy in self._pending:
            ready = waiting[copy.threads] & (copy.groups < self._committed[copy.threads] - allowed)
            done, rest = (copy, None) if ready.all() else copy.split(ready)
            if len(done.threads):
                if self._late:
                    self._shared.write(done.places, done.size, done.values)
                self._shared.arrive(done.places, done.size)
            if rest is not None:
                left.append(rest)
        self._pending = left

    def check_exit(self) -> None:
        """Checks that every copy was waited for.

        Raises:
          PendingCopyFault.
        """
        if any(len(copy.threads) for copy in self._pending):
            raise PendingCopyFault("the kernel ends before an asynchronous copy that nobody awaits")
