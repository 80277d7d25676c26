"""Reads the low two bits of 256 quants from 64 bytes, for Q2_K and Q3_K.

A quantization block has two halves h of 128 weights, each with four groups g of 32. Weight 128h +
32g + j has bits 2g of byte 32h + j.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ptx import Pointer, u32
from ..base import bits
from .packed_row import Share
from .packed_words import Words


def quants(qs: Any, xp: Any) -> Any:
    """Unpacks uint8 (..., 64) to uint8 (..., 256) of 0 to 3."""
    leading = qs.shape[:-1]
    return bits(qs.reshape(*leading, 2, 32), 4, 2, xp).reshape(*leading, 256)


class LowBits:
    """A lane's share of the bytes: 64 / lanes weights of each of its groups.

    With 4 lanes, lane `part` has values 16 * (part % 2) to + 15 of the groups of half h = part //
    2. With 32 lanes, it has four values of two of the groups.

    Attributes:
      upper: h.
      column: the lane's first column in a group.
      unit: index of the lane's first group, divided by two (u32).
      groups: number of groups of the lane.
      count: words of four bytes.
      half: u32, which 16 of a group's 32 weights the lane has.
    """

    def __init__(self, qs: Pointer, share: Share) -> None:
        part, lanes = share.part, share.lanes
        length = max(64 // lanes, 4)
        columns = 32 // length  # adjacent lanes
        self.upper, self.column = part // (lanes // 2), part % columns * length
        self.half = self.column // 16
        self.unit, self.groups = self.upper * 2, 4
        if lanes == 32:
            self.unit, self.groups = self.unit + part // columns % 2, 2
        self.value_base = self.unit * 64 + self.column
        self.runs: Sequence[tuple[int, int]] = tuple((32 * g, length) for g in range(self.groups))
        self.count = length // 4
        self._words = (
            qs.at(share.row, share.block, self.upper * 32 + self.column).cast(u32).moving()
        )

    def load(self, block: int) -> Words:
        """Loads the bytes of the quantization block `block` blocks after the current one."""
        return self._words.load_run(block * 16, self.count)

    def aligned(self, words: Words) -> Words:
        """Emits a shift of the loaded bytes so that the lane's group i is in bits 2 * i."""
        if self.groups == 4:
            return words
        return [word >> ((self.unit & 1) * 4) for word in words]

    def advance(self, blocks: int) -> None:
        self._words.advance(16 * blocks)
