"""Q4_X: 32 weights in 20 bytes; weight = d * scale[s] * (q - 8), int8 scales of 16 weights.

A format that no file has: Q4_0's nibbles, and Q6_K's scales beside d.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..ptx import Builder, Pointer, Value, f32, s8, s32, u32
from . import q4_0
from .base import BlockFormat, f16_array, nibbles
from .unpack import packed_tile
from .unpack.packed_block import DequantizedRun
from .unpack.packed_row import Tile, signed_run
from .unpack.packed_tile import TilePlane
from .unpack.packed_words import byte_floats, f16_of


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    step = f16_array(field["d"]) * field["scales"].view(np.int8).astype(np.float32)
    quants = nibbles(field["qs"], xp).astype(np.float32) - np.float32(8)
    values = step[..., None] * quants.reshape(*quants.shape[:-1], 2, 16)
    return values.reshape(*quants.shape)


def _scales(k: Builder, word: Value) -> list[Value]:
    return [k.bit_field(word.bits(s32), at, 8) for at in (16, 24)]


class PackedRow(q4_0.PackedRow):
    """A lane's share of Q4_X rows: that of Q4_0, with a scale for either nibble."""

    scale_type = u32  # d and both scales

    def unpack(self, loaded: tuple[Any, ...]) -> Tile:
        word, words = loaded
        quants = [
            [(w & 0xF0F0F0F0) ^ 0x80808080 for w in low_or_high]
            for low_or_high in ([w << 4 for w in words], words)
        ]
        runs = [
            signed_run(self._k, run, scale, floats=self._floats)
            for run, scale in zip(quants, _scales(self._k, word), strict=True)
        ]
        return Tile(runs, f16_of(word) * (1 / 16), signed=True)


def dequantize(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DequantizedRun]:
    """All 32 weights of a block."""
    qs, ds = planes
    word = ds.cast(u32).load()
    words, d = qs.cast(u32).load(vector=4), f16_of(word)
    runs = []
    for high, scale in enumerate(_scales(k, word)):
        step = d * scale.to(f32)
        quants = byte_floats(k, [(w >> 4 * high) & 0x0F0F0F0F for w in words])
        runs.append(DequantizedRun(16 * high, [step * (q - 8.0) for q in quants]))
    return runs


def int8_groups(
    k: Builder, planes: Sequence[TilePlane], unit: Value
) -> tuple[packed_tile.Int8Group, packed_tile.Int8Group]:
    """Blocks 2 * unit and 2 * unit + 1 as 16 * (q - 8) in int8."""
    qs, ds = planes
    words = qs.matrix(unit * 32)
    rows = [row.at(unit * 8).cast(u32).load(vector=2) for row in ds.rows()]
    groups = []
    for i in range(2):
        mine = words[2 * i : 2 * i + 2]
        steps = [
            [f16_of(row[i]) * (1 / 16) * s.to(f32) for s in _scales(k, row[i])] for row in rows
        ]
        groups.append(
            packed_tile.Int8Group(
                unit * 2 + i,
                [(w & 0xF0F0F0F0) ^ 0x80808080 for w in ([w << 4 for w in mine] + list(mine))],
                s8,
                list(zip(*steps, strict=True)),
            )
        )
    return groups[0], groups[1]


FORMAT = BlockFormat(
    name="Q4_X",
    block_size=32,
    block_bytes=20,
    struct=(("qs", 16), ("d", 2), ("scales", 2)),
    layout=(("qs", ("qs",)), ("ds", ("d", "scales"))),
    f16_fields=("d",),
    weights=_weights,
    quant_bits=4,
    row=PackedRow,
    dequantize=dequantize,
    dequantize_threads=1,
    int8_tile=int8_groups,
)
