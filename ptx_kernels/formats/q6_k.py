"""Q6_K: 256 weights in 210 bytes; weight i = d * scale[i // 16] * (q - 32), with int8 scales.

Source: ggml, `block_q6_K`. The block has two halves h of 128 weights, each with four groups g of
32. Weight 128h + 32g + j has its low four bits in byte 64h + 32(g % 2) + j of `ql` (low nibble for
g < 2, high for g >= 2) and its high two in bits 2g of byte 32h + j of `qh`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..ptx import Builder, Pointer, Value, f16, f32, s8, s32, u32
from .base import BlockFormat, FormatTuning, bits, f16_array
from .unpack import packed_tile
from .unpack.packed_block import DequantizedRun
from .unpack.packed_row import Share, Tile, signed_run
from .unpack.packed_tile import F16Tile, TilePlane
from .unpack.packed_words import Words, byte_floats, shifted


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    blocks = field["ql"].shape[:-1]
    low = bits(field["ql"].reshape(*blocks, 2, 64), 2, 4, xp).reshape(*blocks, 256)
    high = bits(field["qh"].reshape(*blocks, 2, 32), 4, 2, xp).reshape(*blocks, 256)
    quants = (low | (high << 4)).astype(np.float32) - np.float32(32)
    step = f16_array(field["d"]) * field["scales"].view(np.int8).astype(np.float32)
    weights = step[..., None] * quants.reshape(*blocks, 16, 16)
    return weights.reshape(*blocks, 256)


class PackedRow:
    """Reads a lane's share of Q6_K rows: 64 / lanes weights of each of the four groups of 128.

    With 4 lanes, lane `part` has values 16 * (part % 2) to + 15 of the groups of half h = part //
    2. With 32 lanes, it has four values of group g = part // 8 % 2 and of group g + 2. A quant is
    moved to the upper six bits of its byte and its top bit is flipped. That byte is 4 * (q - 32) as
    int8, so the offset of 32 costs neither a subtraction nor a dot product with ones. See
    `packed_row.PackedRow`.
    """

    def __init__(self, k: Builder, planes: Sequence[Pointer], share: Share) -> None:
        self._k, self._floats = k, share.floats
        row, block, part, lanes = share.row, share.block, share.part, share.lanes
        length = max(64 // lanes, 4)
        columns = 32 // length  # adjacent lanes
        upper, column = part // (lanes // 2), part % columns * length
        self._low = upper * 64 + column  # first byte of ql
        self.value_base = upper * 128 + column
        self._groups: tuple[int, ...] = (0, 1, 2, 3)
        scale_bit, self._shift = column // 16 * 8, None
        if lanes == 32:
            group = part // columns % 2
            self._low, self.value_base = self._low + group * 32, self.value_base + group * 32
            self._groups, self._shift, scale_bit = (0, 2), group * 2, scale_bit + group * 16
        self.runs: Sequence[tuple[int, int]] = tuple((32 * g, length) for g in self._groups)
        self._count = length // 4
        ql, qh, scales, d = planes
        self._blocks = ql.shape[1]
        self._ql = ql.at(row, block, self._low).cast(u32).moving()
        self._qh = qh.at(row, block, upper * 32 + column).cast(u32).moving()
        self._scales = scales.at(row, block, upper * 8).cast(u32).moving()
        self._d = d.at(row, block).cast(f16).moving()
        self._scale_bit = scale_bit

    def load(self, row: int, block: int) -> tuple[list[Words], Words, Words, Value]:
        at = row * self._blocks + block
        return (
            [self._ql.load_run(at * 32 + 8 * g, self._count) for g in self._groups if g < 2],
            self._qh.load_run(at * 16, self._count),
            self._scales.load_run(at * 4, 2),
            self._d.load(at),
        )

    def unpack(self, loaded: tuple[list[Words], Words, Words, Value]) -> Tile:
        k = self._k
        low, high, scales, d = loaded
        if self._shift is not None:
            high = [word >> self._shift for word in high]
        high = [word ^ 0xAAAAAAAA for word in high]  # flips the upper bit of every pair
        runs = []
        for group in self._groups:
            words = []
            for nibbles_, pairs in zip(low[group % len(low)], high, strict=True):
                lower = shifted(nibbles_, 2 if group < 2 else -2)
                upper = shifted(pairs, 6 - 2 * group)
                words.append((lower & 0x3C3C3C3C) | (upper & 0xC0C0C0C0))
            # Groups g = 0..3 have sub-blocks 2g and 2g + 1 of these 128: bytes 2g and 2g + 1 of the
            # eight scales.
            scale = k.bit_field(scales[group // 2].bits(s32), self._scale_bit + 16 * (group % 2), 8)
            runs.append(signed_run(k, words, scale, floats=self._floats))
        return Tile(runs, d.to(f32) * 0.25, signed=True)

    def advance(self, blocks: int) -> None:
        self._ql.advance(32 * blocks)
        self._qh.advance(16 * blocks)
        self._scales.advance(4 * blocks)
        self._d.advance(blocks)


def dequantize(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DequantizedRun]:
    """Emits the decoding of 16 weights of group g and 16 of group g + 2, in half h of a block.

    h = part / 4, g = part / 2 % 2. See `packed_block.Dequantize`.
    """
    ql, qh, scales, d = planes
    upper, group, run = part >> 2, (part >> 1) & 1, part & 1
    words = ql.cast(u32).at(part * 4).load(vector=4)
    pairs = qh.cast(u32).at(upper * 8 + run * 4).load(vector=4)
    step = d.cast(f16).load().to(f32)
    runs = []
    for s in range(2):  # low nibbles, then high ones
        top = [((p >> (group * 2 + 4 * s)) & 0x03030303) << 4 for p in pairs]
        quants = [((w >> 4 * s) & 0x0F0F0F0F) | t for w, t in zip(words, top, strict=True)]
        scale = scales.cast(s8).at(upper * 8 + group * 2 + run).load(4 * s).to(f32)
        values = [step * scale * (v - 32.0) for v in byte_floats(k, quants)]
        runs.append(DequantizedRun(upper * 128 + group * 32 + run * 16 + 64 * s, values))
    return runs


def _quants(
    k: Builder, planes: Sequence[TilePlane], unit: Value, flipped: int
) -> tuple[Words, Words]:
    """Returns 4 * q of groups g = unit % 2 and g + 2 of half h = unit / 2, as operand A.

    `flipped`: mask of bits to flip in every byte.
    """
    low = planes[0].matrix(unit * 32)
    pairs = [word ^ flipped if flipped else word for word in planes[1].matrix((unit >> 1) * 32)]
    shift = 6 - (unit & 1) * 2
    return (
        [
            ((q << 2) & 0x3C3C3C3C) | ((p << shift) & 0xC0C0C0C0)
            for q, p in zip(low, pairs, strict=True)
        ],
        [
            ((q >> 2) & 0x3C3C3C3C) | ((p << (shift - 4)) & 0xC0C0C0C0)
            for q, p in zip(low, pairs, strict=True)
        ],
    )


def _scales(k: Builder, plane: TilePlane, unit: Value) -> list[list[Value]]:
    """Returns the scales of the lane's rows: per group a u32 with two scales in its low bytes."""
    at = (unit >> 1) * 8
    rows = [row.at(at).cast(u32).load(vector=2) for row in plane.rows()]
    return [[word >> ((unit & 1) << 4) for word in row] for row in rows]


def int8_groups(
    k: Builder, planes: Sequence[TilePlane], unit: Value
) -> tuple[packed_tile.Int8Group, packed_tile.Int8Group]:
    """Unpacks groups g = unit % 2 and g + 2 of half h = unit / 2, as 4 * (q - 32) in int8.

    See `packed_tile.Int8Groups`.
    """
    low, high = _quants(k, planes, unit, 0xAAAAAAAA)  # flips the upper bit of every pair
    numbers = [
        [d * 0.25 * k.bit_field(s.bits(s32), b, 8).to(f32) for s in words for b in (0, 8)]
        for words, d in zip(_scales(k, planes[2], unit), planes[3].f16(), strict=True)
    ]
    pairs_of = list(zip(*numbers, strict=True))
    index = (unit >> 1) * 4 + (unit & 1)
    return (
        packed_tile.Int8Group(index, low, s8, pairs_of[:2]),
        packed_tile.Int8Group(index + 2, high, s8, pairs_of[2:]),
    )


def block_scales(k: Builder, planes: Sequence[TilePlane]) -> packed_tile.BlockScales:
    """Emits the read of d of the lane's rows (see `packed_tile.BlockScales`)."""
    first, second = planes[3].f16()
    return packed_tile.BlockScales((first, second))


def f16_groups(
    k: Builder, planes: Sequence[TilePlane], unit: Value
) -> tuple[packed_tile.F16Group, packed_tile.F16Group]:
    """Reads the groups of `int8_groups` as f16.

    scale * (q - 32) has up to 12 bits; f16 rounds the last.
    """
    low, high = _quants(k, planes, unit, 0)
    rows = [[word ^ 0x80808080 for word in words] for words in _scales(k, planes[2], unit)]

    def step(row: int, i: int, byte: int) -> packed_tile.Pair:
        return packed_tile.step_of(k, packed_tile.byte_f16(k, rows[row][i], byte, 128), 4, -288)

    low_steps, high_steps = (
        [(step(0, i, byte), step(1, i, byte)) for byte in range(2)] for i in range(2)
    )
    index = (unit >> 1) * 4 + (unit & 1)
    return (
        packed_tile.F16Group(index, low, 0x54, low_steps),
        packed_tile.F16Group(index + 2, high, 0x54, high_steps),
    )


FORMAT = BlockFormat(
    name="Q6_K",
    block_size=256,
    block_bytes=210,
    struct=(("ql", 128), ("qh", 64), ("scales", 16), ("d", 2)),
    layout=(("ql", ("ql",)), ("qh", ("qh",)), ("scales", ("scales",)), ("d", ("d",))),
    f16_fields=("d",),
    weights=_weights,
    quant_bits=6,
    row=PackedRow,
    dequantize=dequantize,
    dequantize_threads=8,
    int8_tile=int8_groups,
    f16_tile=F16Tile(f16_groups, block_scales),
    tuning=FormatTuning(
        gemv_lanes=4,
        gemv_ahead=True,
        gemm_tiles=1,
        int8_issue_slots=28.0,
        instruction_budgets={1: 4.0},
    ),
)
