"""Tracks bytes of shared memory that asynchronous copies in flight may change."""

from __future__ import annotations

import numpy as np

from ..access import Located
from ..errors import AsyncPending
from .shared_memory import SharedMemory

_GRANULE = 4  # bytes of the smallest copy


class InFlight:
    """Copies into a batch's shared memory that have not been waited for, by granule of bytes.

    Its `check` guards shared memory: accessing such bytes is an error.
    """

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared
        granules = shared.views[1].size // _GRANULE
        self._line = np.zeros(granules, np.int64)  # PTX line of the copy in flight, or 0
        self._lane = np.zeros(granules, np.int64)  # lane that issued it
        self._copies = 0
        shared.guards.append(self.check)

    def begin(self, at: Located) -> None:
        """Marks the target bytes of the frame's copies: from now on they must not be accessed."""
        granules = self._granules(at.items, at.width)
        self._line[granules] = at.instruction.line
        self._lane[granules] = at.frame.all_lanes[:, None]
        self._copies += at.items.size

    def end(self, items: np.ndarray, width: int) -> None:
        """Marks the bytes of items as arrived."""
        self._line[self._granules(items, width)] = 0
        self._copies -= items.size

    def _granules(self, items: np.ndarray, width: int) -> np.ndarray:
        """Returns the indices of each item's granules, shape (items, granules per item)."""
        per_item = width // _GRANULE
        return items[:, None] * per_item + np.arange(per_item)

    def check(self, at: Located, what: str) -> None:
        if not self._copies:
            return
        items, width = at.items, at.width
        lines = self._line[items * width // _GRANULE]
        for further in range(_GRANULE, width, _GRANULE):
            lines = np.maximum(lines, self._line[(items * width + further) // _GRANULE])
        if not lines.any():
            return
        position = int(np.argmax(lines != 0))
        first = int(items[position]) * width
        granules = slice(first // _GRANULE, -(-(first + width) // _GRANULE))
        lane = int(self._lane[granules][np.argmax(self._line[granules] != 0)])
        thread = lane % at.frame.layout.padded
        told = (
            f"{what} {width} bytes that the copy of line {int(lines[position])}, issued by thread "
            f"{thread}, may not have finished: nobody waited for its group, or its mbarrier"
        )
        raise at.fault(AsyncPending, position, told)
