"""Q4_0: 32 weights in 18 bytes; weight = d * (q - 8).

Source: ggml, `block_q4_0`. Byte j of `qs` holds weight j in its low nibble and weight 16 + j in its
high one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..ptx import Builder, Pointer, Value, f16, f32, s8, u32
from ..ptx.types import Type
from .base import BlockFormat, FormatTuning, f16_array, nibbles
from .unpack import packed_tile
from .unpack.packed_block import DequantizedRun
from .unpack.packed_row import Share, Tile, signed_run
from .unpack.packed_tile import TilePlane
from .unpack.packed_words import Words, byte_floats, lower_nibbles, upper_nibbles


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    return f16_array(field["d"]) * (nibbles(field["qs"], xp).astype(np.float32) - np.float32(8))


class PackedRow:
    """Reads a lane's share of Q4_0 rows: 16 / lanes bytes of nibbles.

    The lane has 16 / lanes of a quantization block's first 16 weights and as many of the last 16.
    With its top bit flipped, a nibble in the high half of a byte is 16 * (q - 8) as int8, so the
    offset costs nothing. Formats with the same nibble order derive from this class (see
    `packed_row.PackedRow`).
    """

    # element of the last plane: the block's scale, with or without its minimum
    scale_type: Type = f16

    def __init__(self, k: Builder, planes: Sequence[Pointer], share: Share) -> None:
        self._k, self._floats, self._part = k, share.floats, share.part
        qs, scale = planes[0], planes[-1]
        length = 16 // share.lanes
        self._count = length // 4
        self._blocks = qs.shape[1]
        self._qs = qs.at(share.row, share.block, share.part * length).cast(u32).moving()
        self._scale = scale.at(share.row, share.block).cast(self.scale_type).moving()
        self.value_base = share.part * length
        self.runs: Sequence[tuple[int, int]] = ((0, length), (16, length))

    def load(self, row: int, block: int) -> tuple[Any, ...]:
        at = row * self._blocks + block
        return self._scale.load(at), self._qs.load_run(at * 4, self._count)

    def unpack(self, loaded: tuple[Any, ...]) -> Tile:
        d, words = loaded
        runs = [[w ^ 0x80808080 for w in nibbles_] for nibbles_ in upper_nibbles(words)]
        return Tile(
            [signed_run(self._k, run, floats=self._floats) for run in runs],
            d.to(f32) * (1 / 16),
            signed=True,
        )

    def advance(self, blocks: int) -> None:
        self._qs.advance(4 * blocks)
        self._scale.advance(blocks)


def dequantize(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DequantizedRun]:
    """Emits the decoding of a quantization block of 32 (see `packed_block.Dequantize`)."""
    qs, d = planes
    scale = d.cast(f16).load().to(f32)
    quants = lower_nibbles(qs.cast(u32).load(vector=4))
    return [
        DequantizedRun(16 * i, [scale * (v - 8.0) for v in byte_floats(k, run)])
        for i, run in enumerate(quants)
    ]


def fragment_nibbles(qs: TilePlane, unit: Value) -> list[Words]:
    """Returns the nibbles of a unit's two quantization blocks as operand A, one operand per block.

    Each nibble is in the upper half of its byte.
    """
    words = qs.matrix(unit * 32)  # two words per block, for rows g and g + 8
    halves = (upper_nibbles(words[2 * i : 2 * i + 2]) for i in range(2))
    return [[*low, *high] for low, high in halves]


def int8_groups(
    k: Builder, planes: Sequence[TilePlane], unit: Value
) -> tuple[packed_tile.Int8Group, packed_tile.Int8Group]:
    """Unpacks quantization blocks 2 * unit and 2 * unit + 1 as 16 * (q - 8) in int8.

    See `packed_tile.Int8Groups`.
    """
    qs, d = planes
    quants = ([w ^ 0x80808080 for w in words] for words in fragment_nibbles(qs, unit))
    scales = (packed_tile.scaled(scale, 1 / 16) for scale in d.f16_pairs(unit * 4))
    return packed_tile.block_pair(unit, quants, s8, scales)


FORMAT = BlockFormat(
    name="Q4_0",
    block_size=32,
    block_bytes=18,
    struct=(("d", 2), ("qs", 16)),
    layout=(("qs", ("qs",)), ("d", ("d",))),
    f16_fields=("d",),
    weights=_weights,
    quant_bits=4,
    row=PackedRow,
    dequantize=dequantize,
    dequantize_threads=1,
    int8_tile=int8_groups,
    tuning=FormatTuning(instruction_budgets={1: 3.0}),
)
