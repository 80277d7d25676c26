"""Q5_0: 32 weights in 22 bytes; weight = d * (q - 16).

Source: ggml, `block_q5_0`. Byte j of `qs` holds the low four bits of weight j in its low nibble and
those of weight 16 + j in its high one. Bit i of `qh`, a little-endian 32-bit word, is the fifth bit
of weight i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..ptx import Builder, Pointer, Value, f16, f32, s8, u32
from . import q4_0
from .base import BlockFormat, FormatTuning, bits, f16_array, nibbles
from .unpack import packed_tile
from .unpack.packed_block import DequantizedRun
from .unpack.packed_row import Share, Tile, signed_run
from .unpack.packed_tile import TilePlane
from .unpack.packed_words import Words, byte_floats, shifted


def quants(field: Mapping[str, Any], xp: Any) -> Any:
    """Returns the quants from fields qs and qh, float32 (..., 32) from 0 to 31; also for Q5_1."""
    fifth = bits(field["qh"][..., None], 8, 1, xp)  # (..., 4, 8, 1)
    return (nibbles(field["qs"], xp) | (fifth.reshape(*field["qh"].shape[:-1], 32) << 4)).astype(
        np.float32
    )


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    return f16_array(field["d"]) * (quants(field, xp) - np.float32(16))


class PackedRow(q4_0.PackedRow):
    """Reads a lane's share of Q5_0 rows: like Q4_0, with fifth bits.

    A quant at the top of a byte with its fifth bit flipped is 8 * (q - 16) as int8.
    """

    def __init__(self, k: Builder, planes: Sequence[Pointer], share: Share) -> None:
        super().__init__(k, planes, share)
        self._qh = planes[1].at(share.row, share.block).cast(u32).moving()

    def load(self, row: int, block: int) -> tuple[Any, ...]:
        return *super().load(row, block), self._qh.load(row * self._blocks + block)

    def unpack(self, loaded: tuple[Any, ...]) -> Tile:
        d, words, fifth = loaded
        runs = self.quant_bytes(words, ~fifth, 3)
        return Tile(
            [signed_run(self._k, run, floats=self._floats) for run in runs],
            d.to(f32) * 0.125,
            signed=True,
        )

    def quant_bytes(self, words: Words, fifth: Value, shift: int) -> list[list[Value]]:
        """Returns the quants of the lane's two runs, each shifted left by `shift` in its byte."""
        mine = fifth >> self.value_base
        return [
            [
                (shifted(w, shift - 4 * high) & (0x0F0F0F0F << shift))
                | _spread(mine >> (16 * high + 4 * i), shift + 4)
                for i, w in enumerate(words)
            ]
            for high in range(2)
        ]

    def advance(self, blocks: int) -> None:
        super().advance(blocks)
        self._qh.advance(blocks)


def _spread(bits: Value, to: int) -> Value:
    """Emits the spread of the lowest four bits, one to bit `to` of each byte.

    Copies 7 bits apart don't overlap.
    """
    return ((bits & 0xF) * ((0x00204081 << to) & 0xFFFFFFFF)) & (0x01010101 << to)


def unpack_block(k: Builder, qs: Pointer, qh: Pointer) -> list[list[Value]]:
    """Emits unpacking of a block to f32 quants from 0 to 31: weights 0 to 15, then 16 to 31.

    Q5_1 uses it too.
    """
    words = qs.cast(u32).load(vector=4)
    fifth = qh.cast(u32).load()
    runs = []
    for high in range(2):
        joined = []
        for i, word in enumerate(words):
            joined.append(
                ((word >> 4 * high) & 0x0F0F0F0F) | _spread(fifth >> (16 * high + 4 * i), 4)
            )
        runs.append(byte_floats(k, joined))
    return runs


def dequantize(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DequantizedRun]:
    """Emits the decoding of a quantization block of 32 (see `packed_block.Dequantize`)."""
    qs, qh, d = planes
    scale = d.cast(f16).load().to(f32)
    return [
        DequantizedRun(16 * i, [scale * (v - 16.0) for v in values])
        for i, values in enumerate(unpack_block(k, qs, qh))
    ]


def fragment_bytes(
    k: Builder, qs: TilePlane, qh: TilePlane, unit: Value, shift: int, flipped: bool
) -> list[Words]:
    """Returns the quants of a unit's two quantization blocks as operand A, each shifted left.

    `flipped` flips the quants' top bit.
    """
    words = qs.matrix(unit * 32)  # two words per block, for rows g and g + 8
    columns = k.lane_id % 4 * 4
    rows = [row.at(unit * 8).cast(u32).load(vector=2) for row in qh.rows()]
    blocks: list[Words] = []
    for i in range(2):
        fifths = [(~row[i] if flipped else row[i]) >> columns for row in rows]
        blocks.append(
            [
                (shifted(w, shift - 4 * high) & (0x0F0F0F0F << shift))
                | _spread(fifth >> (16 * high), shift + 4)
                for high in range(2)
                for w, fifth in zip(words[2 * i : 2 * i + 2], fifths, strict=True)
            ]
        )
    return blocks


def int8_groups(
    k: Builder, planes: Sequence[TilePlane], unit: Value
) -> tuple[packed_tile.Int8Group, packed_tile.Int8Group]:
    """Unpacks quantization blocks 2 * unit and 2 * unit + 1 as 8 * (q - 16) in int8.

    See `packed_tile.Int8Groups`.
    """
    qs, qh, d = planes
    quants = fragment_bytes(k, qs, qh, unit, 3, True)
    scales = (packed_tile.scaled(scale, 1 / 8) for scale in d.f16_pairs(unit * 4))
    return packed_tile.block_pair(unit, quants, s8, scales)


FORMAT = BlockFormat(
    name="Q5_0",
    block_size=32,
    block_bytes=22,
    struct=(("d", 2), ("qh", 4), ("qs", 16)),
    layout=(("qs", ("qs",)), ("qh", ("qh",)), ("d", ("d",))),
    f16_fields=("d",),
    weights=_weights,
    quant_bits=5,
    row=PackedRow,
    dequantize=dequantize,
    dequantize_threads=1,
    int8_tile=int8_groups,
    tuning=FormatTuning(instruction_budgets={1: 4.0}),
)
