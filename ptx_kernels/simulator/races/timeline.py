"""Time of a launch: it counts barriers, releases and batches of blocks."""

from __future__ import annotations

import numpy as np


class Timeline:
    """Times of a launch, and which blocks ran when."""

    def __init__(self) -> None:
        self.now = 0
        self._batches: list[tuple[int, np.ndarray, int]] = []  # start, blocks, lanes per block

    def tick(self) -> int:
        """A new time, later than all accesses so far."""
        self.now += 1
        return self.now

    def begin(self, blocks: np.ndarray, padded: int) -> int:
        """The time at which a batch of these blocks starts, each of `padded` lanes."""
        self._batches.append((self.tick(), blocks, padded))
        return self.now

    def blocks_of(self, times: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Numbers of the blocks that had these lanes at these times, shape (n,)."""
        numbers = np.zeros(times.size, np.int64)
        ran = np.searchsorted([start for start, _, _ in self._batches], times, "right") - 1
        for batch in np.unique(ran):
            _, blocks, padded = self._batches[batch]
            numbers[ran == batch] = blocks[lanes[ran == batch] // padded]
        return numbers
