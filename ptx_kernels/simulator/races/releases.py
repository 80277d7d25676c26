"""Releases: the vector clocks left in memory for later acquires."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..access import Located
from .vector_clock import NOTHING, VectorClock


@dataclass
class Released:
    """Clocks left at one word: for all blocks, and for the threads of one block of the grid."""

    wide: VectorClock = NOTHING
    of_block: dict[int, VectorClock] = field(default_factory=dict)

    def leave(self, block: int, wide: VectorClock, narrow: VectorClock) -> None:
        self.wide = self.wide.join(wide)
        self.of_block[block] = self.of_block.get(block, NOTHING).join(narrow)


@dataclass
class Releases:
    """Released words of one memory, by origin (a buffer's address), item and item width."""

    known: dict[tuple[int, int, int], Released] = field(default_factory=dict)

    def overwrite(self, at: Located) -> None:
        """Removes releases that weak stores overwrite; later reads acquire nothing from them."""
        index, width = at.items, at.width
        for origin, item, size in list(self.known):
            if origin != at.origin:
                continue
            if (((index + 1) * width > item * size) & (index * width < (item + 1) * size)).any():
                del self.known[origin, item, size]
