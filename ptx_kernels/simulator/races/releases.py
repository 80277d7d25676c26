"""Stores the vector clocks that releases leave at memory words, for later acquires."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..access import Located
from .vector_clock import NOTHING, VectorClock


@dataclass
class Released:
    """Vector clocks released at one word: to all thread blocks, and to each single thread block."""

    wide: VectorClock = NOTHING
    of_block: dict[int, VectorClock] = field(default_factory=dict)

    def leave(self, block: int, wide: VectorClock, narrow: VectorClock) -> None:
        self.wide = self.wide.join(wide)
        self.of_block[block] = self.of_block.get(block, NOTHING).join(narrow)


@dataclass
class Releases:
    """Released vector clocks of one memory, by (origin, item, item width).

    The origin is a buffer's address.
    """

    known: dict[tuple[int, int, int], Released] = field(default_factory=dict)

    def overwrite(self, at: Located) -> None:
        """Removes clocks of words that weak stores overwrite; later reads acquire none there."""
        index, width = at.items, at.width
        for origin, item, size in list(self.known):
            if origin != at.origin:
                continue
            if (((index + 1) * width > item * size) & (index * width < (item + 1) * size)).any():
                del self.known[origin, item, size]
