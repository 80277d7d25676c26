"""Counts memory traffic: shared memory bank conflicts and global memory sectors, per warp.

Shared memory has 32 banks of 4 bytes. One wavefront serves one word per bank. Accesses of 8 and 16
bytes are served in halves and quarters of the warp (CUDA C++ Programming Guide, "Shared Memory").
Global memory moves sectors of 32 bytes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from .access import Located
from .layout import WARP

_BANKS = 32
_WORD = 4
_SECTOR = 32
_SHIFT = 44  # bits for the number of an item; the warp's number is above them


@dataclass
class Count:
    """Wavefronts or sectors of one PTX line, and the minimum for the same bytes."""

    moved: int = 0
    least: int = 0

    @property
    def excess(self) -> float:
        """Ratio to the minimum; 1 means no bank conflicts and no partly used sectors."""
        return self.moved / self.least if self.least else 1.0

    def add(self, moved: int, least: int) -> None:
        self.moved += moved
        self.least += least


def wavefronts(at: Located) -> tuple[int, int]:
    """Returns (wavefronts of one instruction's accesses, the minimum for as many words)."""
    index, width = at.items, at.width
    words = max(1, width // _WORD)
    phase = at.frame.all_lanes // (WARP // words)  # lanes that are served together
    first_word = index[:, None] * words if width >= _WORD else index[:, None] * width // _WORD
    word = first_word + np.arange(words)
    # a word that several lanes want is served once
    served = np.unique(phase[:, None] << _SHIFT | word)
    banks, in_bank = np.unique((served >> _SHIFT) * _BANKS + served % _BANKS, return_counts=True)
    phases, first = np.unique(banks // _BANKS, return_index=True)
    return int(np.maximum.reduceat(in_bank, first).sum()), phases.size


@dataclass
class Traffic:
    """Traffic counts by PTX line, filled by a launch.

    Global memory counts assume that nothing is cached.
    """

    shared: defaultdict[int, Count] = field(default_factory=lambda: defaultdict(Count))
    global_: defaultdict[int, Count] = field(default_factory=lambda: defaultdict(Count))

    def count_shared(self, at: Located) -> None:
        self.shared[at.instruction.line].add(*wavefronts(at))

    def count_global(self, at: Located) -> None:
        """Counts the sectors of accesses to one buffer."""
        items = np.unique((at.frame.all_lanes // WARP << _SHIFT) | at.items)
        warps, item = items >> _SHIFT, items & ((1 << _SHIFT) - 1)
        sectors = np.unique(warps << _SHIFT | item * at.width // _SECTOR)
        _, of_warp = np.unique(warps, return_counts=True)
        self.global_[at.instruction.line].add(
            sectors.size, int((-(-of_warp * at.width // _SECTOR)).sum())
        )


def worst(counts: dict[int, Count]) -> tuple[int, Count] | None:
    """Returns (line, count) of the PTX line with the most wavefronts or sectors over the minimum.

    None if no line has more than the minimum.
    """
    wasteful = [(line, count) for line, count in counts.items() if count.moved > count.least]
    return max(wasteful, key=lambda item: item[1].moved - item[1].least, default=None)


def total(counts: dict[int, Count]) -> Count:
    return Count(sum(c.moved for c in counts.values()), sum(c.least for c in counts.values()))
