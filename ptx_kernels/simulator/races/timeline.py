"""Logical time of a launch, advanced by barriers, releases and new batches of thread blocks."""

from __future__ import annotations

import numpy as np


class Timeline:
    """Logical clock of a launch, with a record of which thread blocks ran when."""

    def __init__(self) -> None:
        self.now = 0
        self._batches: list[tuple[int, np.ndarray, int]] = []  # start, blocks, lanes per block

    def tick(self) -> int:
        """Advances time; returns a time later than all accesses so far."""
        self.now += 1
        return self.now

    def begin(self, blocks: np.ndarray, padded: int) -> int:
        """Starts a batch of thread blocks, each of `padded` lanes; returns its start time."""
        self._batches.append((self.tick(), blocks, padded))
        return self.now

    def blocks_of(self, times: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Returns the thread block numbers of these lanes at these times, shape (n,)."""
        numbers = np.zeros(times.size, np.int64)
        ran = np.searchsorted([start for start, _, _ in self._batches], times, "right") - 1
        for batch in np.unique(ran):
            _, blocks, padded = self._batches[batch]
            numbers[ran == batch] = blocks[lanes[ran == batch] // padded]
        return numbers
