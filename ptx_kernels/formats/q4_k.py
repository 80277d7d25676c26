"""Q4_K: 256 weights in 144 bytes; weight = d * scale[s] * q - dmin * min[s], sub-blocks s of 32.

Source: ggml, `block_q4_K`. Byte j of the 32-byte group c of `qs` holds weight 64c + j in its low
nibble and weight 64c + 32 + j in its high one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..ptx import Builder, Pointer, Value, f32, s32, u8, u32
from .base import BlockFormat, FormatTuning, nibbles
from .unpack import k_scales, packed_tile
from .unpack.packed_block import DequantizedRun
from .unpack.packed_row import Run, Share, Tile
from .unpack.packed_tile import F16Tile, TilePlane
from .unpack.packed_words import ANCHOR, Words, affine, anchored_floats, byte_floats, f16_of


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    return k_scales.weights(field, low_bits(field["qs"], xp), xp)


def low_bits(qs: Any, xp: Any) -> Any:
    """Splits nibbles into eight sub-blocks, uint8 (..., 128) -> (..., 8, 32).

    Q5_K's low bits have the same layout.
    """
    groups = qs.reshape(*qs.shape[:-1], 4, 32)
    return nibbles(groups, xp).reshape(*groups.shape[:-2], 8, 32)


class PackedRow:
    """Reads a lane's share of Q4_K rows: 128 / lanes bytes of nibbles of one 32-byte group.

    With 4 lanes, each lane has a full group and so both of the group's sub-blocks. With more, lanes
    / 4 lanes share a group; with q8_1 activations, two of these add the min term of one sub-block
    each. See `packed_row.PackedRow`.
    """

    block_words = 36  # u32 per block
    quants_at = 4  # index of the first word of nibbles

    def __init__(self, k: Builder, planes: Sequence[Pointer], share: Share) -> None:
        self._k, self._floats, self._broadcast = k, share.floats, share.broadcast
        shares, length = share.lanes // 4, 128 // share.lanes
        self._group, self._share = share.part // shares, share.part % shares
        self._count = length // 4  # words of nibbles
        words = planes[0].cast(u32)
        first = words.at(share.row, share.block)
        self._row_words = words.shape[1] * self.block_words
        self._header = (first.at(share.part % 4) if share.broadcast else first).moving()
        self._quants = first.at(share.part * self._count).moving()
        self.value_base = self._group * 64 + self._share * length
        self.runs: Sequence[tuple[int, int]] = ((0, length), (32, length))
        one_minimum = shares > 1 and not share.floats  # one of the two; another lane has the other
        self._minimum_group = self._share & 1 if one_minimum else None
        self._scales = k_scales.PairReader(
            k, self._group, self._share if one_minimum else None, shares
        )

    def load(self, row: int, block: int) -> tuple[Words, Words]:
        at = row * self._row_words + block * self.block_words
        header = self._header.load_run(at, 1 if self._broadcast else 4)
        return header, self._quants.load_run(at + self.quants_at, self._count)

    def unpack(self, loaded: tuple[Words, ...]) -> Tile:
        k = self._k
        header, *packed = loaded
        if self._broadcast:
            header = [k.shuffle(header[0], i, lanes=4) for i in range(4)]
        d, dmin = f16_of(header[0], 0), f16_of(header[0], 1)
        scales, minimums = self._scales.read(header[1:])
        numbers = (scales & 0xFF, scales >> 8)
        if self._floats:
            words, multiple = self.seven_bits(*packed)
            runs = [
                Run(anchored_floats(k, quants), s.to(f32), ANCHOR)
                for quants, s in zip(words, numbers, strict=True)
            ]
        else:
            words, multiples = self.quant_bytes(*packed)
            multiple = max(multiples)
            runs = [
                Run(quants, (s if own == multiple else s * (multiple // own)).bits(s32))
                for quants, s, own in zip(words, numbers, multiples, strict=True)
            ]
        d = d * (1 / multiple) if multiple > 1 else d
        return Tile(runs, d, [dmin * m.to(f32) for m in minimums], self._minimum_group)

    def quant_bytes(self, quants: Words) -> tuple[tuple[Words, Words], tuple[int, int]]:
        """Returns (bytes of the low sub-block, of the high one), and their factors over the quants.

        The factors are (1, 16): high nibbles are not shifted.
        """
        return ([q & 0x0F0F0F0F for q in quants], [q & 0xF0F0F0F0 for q in quants]), (1, 16)

    def seven_bits(self, quants: Words) -> tuple[tuple[Words, Words], int]:
        """Like `quant_bytes`, but with bytes below 128 that are as large as possible.

        Large bytes lose the least precision when the anchor is subtracted in f32.
        """
        return ([(q << 3) & 0x78787878 for q in quants], [(q >> 1) & 0x78787878 for q in quants]), 8

    def advance(self, blocks: int) -> None:
        self._header.advance(self.block_words * blocks)
        self._quants.advance(self.block_words * blocks)


def dequantize(
    k: Builder,
    planes: Sequence[Pointer],
    part: Value,
    high_bits: Sequence[Value] | None = None,
    quants_at: int = 16,
) -> list[DequantizedRun]:
    """Emits the decoding of 16 weights of sub-block 2 * (part // 2) and 16 of the next.

    See `packed_block.Dequantize`. Q5_K also calls it: it passes `quants_at`, the start of its
    nibbles, and `high_bits`, four words whose bytes hold the fifth bits of sub-blocks 0 to 7 in
    bits 0 to 7.
    """
    group, run = part >> 1, part & 1
    block = planes[0].cast(u32)
    header = block.load(0, vector=4)
    words = block.at(part * 4).load(quants_at // 4, vector=4)
    d, dmin = f16_of(header[0], 0), f16_of(header[0], 1)
    scales, minimums = k_scales.PairReader(k, group).read(header[1:])
    runs = []
    for s, (scale, minimum) in enumerate(zip((scales & 0xFF, scales >> 8), minimums, strict=True)):
        quants = [(w >> 4 * s) & 0x0F0F0F0F for w in words]
        if high_bits is not None:
            fifth = [((bits >> (group * 2 + s)) & 0x01010101) << 4 for bits in high_bits]
            quants = [q | h for q, h in zip(quants, fifth, strict=True)]
        step, low = d * scale.to(f32), dmin * minimum.to(f32)
        runs.append(
            DequantizedRun(
                group * 64 + run * 16 + 32 * s, affine(byte_floats(k, quants), step, low)
            )
        )
    return runs


def scales(k: Builder, plane: TilePlane, unit: Value) -> list[packed_tile.Pair]:
    """Emits d * scale of a unit's two sub-blocks for the lane's rows; also for Q5_K."""
    reader = k_scales.PairReader(k, unit)
    found = []
    for row in plane.rows():
        header = row.cast(u32).load(vector=4)
        d, (both, _) = f16_of(header[0]), reader.read(header[1:])
        found.append([d * (both & 0xFF).to(f32), d * (both >> 8).to(f32)])
    return list(zip(*found, strict=True))


def int8_groups(
    k: Builder, planes: Sequence[TilePlane], unit: Value
) -> tuple[packed_tile.Int8Group, packed_tile.Int8Group]:
    """Unpacks sub-blocks 2 * unit, in low nibbles, and 2 * unit + 1, in high ones.

    See `packed_tile.Int8Groups`.
    """
    words = planes[0].matrix(unit * 32 + 16)
    low, high = scales(k, planes[0], unit)
    sixteenth = packed_tile.scaled(high, 1 / 16)  # the high nibbles are not shifted
    return (
        packed_tile.Int8Group(unit * 2, [w & 0x0F0F0F0F for w in words], u8, [low]),
        packed_tile.Int8Group(unit * 2 + 1, [w & 0xF0F0F0F0 for w in words], u8, [sixteenth]),
    )


def int8_minimums(k: Builder, planes: Sequence[TilePlane]) -> packed_tile.Minimums:
    """Emits reads of -dmin and mins of the lane's rows; also for Q5_K.

    See `packed_tile.Minimums`.
    """
    headers = [row.cast(u32).load_run(0, 4) for row in planes[0].rows()]
    minimums = [k_scales.minimums_of(header[1:], k.lane_id % 4) for header in headers]
    return packed_tile.Minimums(
        (-f16_of(headers[0][0], 1), -f16_of(headers[1][0], 1)),
        [packed_tile.twice_minimum(k, minimums[r][i]) for i in range(2) for r in range(2)],
    )


Steps = tuple[packed_tile.Pair, packed_tile.Pair]  # for rows g and g + 8


def steps(k: Builder, plane: TilePlane, unit: Value, multiples: tuple[int, int]) -> list[Steps]:
    """Returns f16x2 (factor, addend) of both sub-blocks of a unit for the lane's rows.

    `multiples`: the bytes are this many times the quants.
    """
    reader = k_scales.PairReader(k, unit)
    rows = [reader.read(row.cast(u32).load_run(0, 4)[1:])[0] for row in plane.rows()]

    def step(row: Value, i: int) -> packed_tile.Pair:
        return packed_tile.step_of(
            k, packed_tile.byte_f16(k, row, i), 1 / multiples[i], -1024 / multiples[i]
        )

    return [(step(rows[0], i), step(rows[1], i)) for i in range(2)]


def block_scales(k: Builder, planes: Sequence[TilePlane]) -> packed_tile.BlockScales:
    """Emits reads of d, -32 * dmin and mins of the lane's rows (see `packed_tile.BlockScales`)."""
    headers = [row.cast(u32).load_run(0, 4) for row in planes[0].rows()]
    minimums = [k_scales.minimums_of(header[1:], k.lane_id % 4) for header in headers]
    return packed_tile.BlockScales(
        (f16_of(headers[0][0]), f16_of(headers[1][0])),
        (f16_of(headers[0][0], 1) * -32.0, f16_of(headers[1][0], 1) * -32.0),
        [packed_tile.byte_f16(k, minimums[r][i], 0).bits(u32) for i in range(2) for r in range(2)],
    )


def f16_groups(
    k: Builder, planes: Sequence[TilePlane], unit: Value
) -> tuple[packed_tile.F16Group, packed_tile.F16Group]:
    """Reads the sub-blocks of `int8_groups` as f16."""
    words = planes[0].matrix(unit * 32 + 16)
    low, high = steps(k, planes[0], unit, (1, 16))
    return (
        packed_tile.F16Group(unit * 2, [w & 0x0F0F0F0F for w in words], 0x64, [low]),
        packed_tile.F16Group(unit * 2 + 1, [w & 0xF0F0F0F0 for w in words], 0x64, [high]),
    )


FORMAT = BlockFormat(
    name="Q4_K",
    block_size=256,
    block_bytes=144,
    struct=(("d", 2), ("dmin", 2), ("scales", 12), ("qs", 128)),
    layout=(("block", ("d", "dmin", "scales", "qs")),),  # 144 = 9 * 16: aligned as stored
    f16_fields=("d", "dmin"),
    weights=_weights,
    quant_bits=4,
    row=PackedRow,
    broadcast_header=True,
    dequantize=dequantize,
    dequantize_threads=8,
    int8_tile=int8_groups,
    int8_minimums=int8_minimums,
    f16_tile=F16Tile(f16_groups, block_scales),
    tuning=FormatTuning(
        gemv_ahead=True,
        gemm_unrolled=32,
        int8_issue_slots=16.6,
        instruction_budgets={1: 3.5, 4: 6.0},
    ),
)
