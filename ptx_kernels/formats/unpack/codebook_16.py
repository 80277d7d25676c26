"""Readers for formats whose 4-bit codes index a codebook of 16 int8 values, with a block scale.

A quantization block's 16 bytes of codes are stored like Q4_0's nibbles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...ptx import Builder, Pointer, Value, f32, u32
from .. import q4_0
from ..base import nibbles
from .packed_block import DequantizedRun
from .packed_row import Tile, signed_run
from .packed_tile import TilePlane
from .packed_words import Words, looked_up, signed_byte_floats


def entries(table: Sequence[int], codes: Any, xp: Any) -> Any:
    """Looks up the codes of quantization blocks: uint8 (..., 16) -> float32 (..., 32)."""
    return xp.asarray(np.array(table, np.float32))[nibbles(codes, xp)]


class PackedRow(q4_0.PackedRow):
    """Reads a lane's share of rows of 4-bit codes: Q4_0's nibbles, which index `table`."""

    table: Sequence[int]

    def unpack(self, loaded: tuple[Any, ...]) -> Tile:
        scale, words = loaded
        runs = looked_up(self._k, self.table, words)
        return Tile(
            [signed_run(self._k, run, floats=self._floats) for run in runs],
            self.scale(scale),
            signed=True,
        )

    def scale(self, loaded: Value) -> Value:
        """Emits a quantization block's scale, f32, from its loaded bytes."""
        return loaded.to(f32)


def dequantize(
    k: Builder, table: Sequence[int], codes: Pointer, scale: Value, first: Value | int = 0
) -> list[DequantizedRun]:
    """Emits the decoding of a block's 32 weights from `first` on.

    See `packed_block.Dequantize`.
    """
    return [
        DequantizedRun(first + 16 * i, [scale * v for v in signed_byte_floats(k, run)])
        for i, run in enumerate(looked_up(k, table, codes.cast(u32).load(vector=4)))
    ]


def fragments(k: Builder, table: Sequence[int], codes: TilePlane, unit: Value) -> list[Words]:
    """Returns the codebook values of a unit's two quantization blocks as operands A."""
    words = codes.matrix(unit * 32)  # two words per block, for rows g and g + 8
    halves = (looked_up(k, table, words[2 * i : 2 * i + 2]) for i in range(2))
    return [[*low, *high] for low, high in halves]
