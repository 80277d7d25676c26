"""Q3_K: 256 weights in 110 bytes; weight = d * (scale[i // 16] - 32) * (q - 4).

Source: ggml, `block_q3_K`. The block has two halves h of 128 weights, each with four groups g of
32. Weight 128h + 32g + j has its low two bits in `qs` (see `two_bits`) and its third in bit 4h + g
of byte j of `hmask`. There are sixteen 6-bit scales. For scales 4u to 4u + 3, the low four bits are
nibbles u / 2 of bytes 4(u % 2) to + 3 of `scales`, and the high two are bits 2u of its last four
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..ptx import Builder, Pointer, Value, f16, f32, s8, s32, u32
from .base import BlockFormat, FormatTuning, bits, f16_array
from .unpack import packed_tile, two_bits
from .unpack.packed_block import DequantizedRun
from .unpack.packed_row import Run, Share, Tile, signed_run
from .unpack.packed_tile import TilePlane
from .unpack.packed_words import Words, byte_floats, shifted


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    leading = field["qs"].shape[:-1]
    low = two_bits.quants(field["qs"], xp)
    third = bits(field["hmask"], 8, 1, xp).reshape(*leading, 256)
    quants = (low | (third << 2)).astype(np.float32) - np.float32(4)
    scales = bits(field["scales"][..., :8], 2, 4, xp).reshape(*leading, 16)
    scales = scales | (bits(field["scales"][..., 8:], 4, 2, xp).reshape(*leading, 16) << 4)
    step = f16_array(field["d"]) * (scales.astype(np.float32) - np.float32(32))
    return (step[..., None] * quants.reshape(*leading, 16, 16)).reshape(*leading, 256)


def _four_scales(low: Value, high: Value, unit: Value) -> Value:
    """Emits scales 4 * unit to + 3, one byte each, as scale - 32 in six signed bits.

    low: the word with the scales' low nibbles; high: the last of the three words.
    """
    nibbles = (low >> (unit >> 1 << 2)) & 0x0F0F0F0F
    return (nibbles | (((high >> (unit << 1)) & 0x03030303) << 4)) ^ 0x20202020


def _signed(k: Builder, scales: Value, position: Value | int) -> Value:
    return k.bit_field(scales.bits(s32), position, 6)


#: Up to this many rows of activations, two products of unshifted quants cost less than shifting
#: them.
_TWO_PARTS = 2


class PackedRow:
    """Reads a lane's share of Q3_K rows (see `two_bits.LowBits`, `packed_row.PackedRow`).

    For few activations group g's low bits are not shifted: a byte is 4^g times their value, and
    each flipped third bit counts as -4. For more activations, which share the unpacking, a quant is
    moved to the upper three bits of its byte and its top bit is flipped. That byte is 32 * (q - 4)
    as int8.
    """

    def __init__(self, k: Builder, planes: Sequence[Pointer], share: Share) -> None:
        self._k, self._floats = k, share.floats
        self._two_parts = not share.floats and share.activations <= _TWO_PARTS
        qs, hmask, scales, d = planes
        self._low = low = two_bits.LowBits(qs, share)
        self.value_base, self.runs = low.value_base, low.runs
        self._blocks = qs.shape[1]
        at = share.row, share.block
        self._hmask = hmask.at(*at, low.column).cast(u32).moving()
        self._scales = scales.at(*at).cast(u32).moving()
        self._d = d.at(*at).cast(f16).moving()

    def load(self, row: int, block: int) -> tuple[Words, Words, Words, Value]:
        at = row * self._blocks + block
        return (
            self._low.load(at),
            self._hmask.load_run(at * 8, self._low.count),
            self._scales.load_run(at * 3, 3),
            self._d.load(at),
        )

    def unpack(self, loaded: tuple[Words, Words, Words, Value]) -> Tile:
        k = self._k
        words, third, packed, d = loaded
        words = self._low.aligned(words)
        third = [word >> (self._low.unit * 2) for word in third]
        scales = self._scale_bytes(packed)
        runs = []
        for g in range(self._low.groups):
            # byte g of the word as s32; the other three bytes replicate its sign
            scale = k.permute(scales, scales, 0x8880 + 0x1111 * g).bits(s32)
            if not self._two_parts:
                quants = [
                    (shifted(q, 5 - 2 * g) & 0x60606060) | (shifted(~t, 7 - g) & 0x80808080)
                    for q, t in zip(words, third, strict=True)
                ]
                runs.append(signed_run(k, quants, scale, floats=self._floats))
                continue
            quants = [word & (0x03030303 << 2 * g) for word in words]
            flipped = [~word & (0x01010101 << g) for word in third]
            unit = 0.25 ** (g + 1)  # scales are four times their value
            runs.append(Run(quants, scale, less=flipped, less_factor=4 << g, unit=unit))
        if self._two_parts:
            return Tile(runs, d.to(f32))
        return Tile(runs, d.to(f32) * (1 / 128), signed=True)

    def _scale_bytes(self, packed: Words) -> Value:
        """Emits 4 * (scale - 32) of the lane's groups, int8, the first in the lowest byte."""
        k, low = self._k, self._low
        if low.groups == 4:
            # bytes `half` and half + 2 of two words
            pick = low.half * 0x1111 + 0x6420
            nibbles = k.permute(packed[0], packed[1], pick) >> (low.upper * 4)
            pairs = k.permute(packed[2], packed[2] >> 2, pick) >> (low.upper * 4)
        else:
            nibbles = k.select(low.unit % 2 == 0, packed[0], packed[1]) >> (low.upper * 4)
            pairs = packed[2] >> (low.unit * 2)
            nibbles, pairs = (
                k.permute(word, word, low.half * 0x1111 + 0x2020) for word in (nibbles, pairs)
            )
        return (((nibbles & 0x0F0F0F0F) << 2) | ((pairs & 0x03030303) << 6)) ^ 0x80808080

    def advance(self, blocks: int) -> None:
        self._low.advance(blocks)
        self._hmask.advance(8 * blocks)
        self._scales.advance(3 * blocks)
        self._d.advance(blocks)


def dequantize(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DequantizedRun]:
    """Emits the decoding of 16 weights of each group in a block's half h = part / 2.

    See `packed_block.Dequantize`.
    """
    qs, hmask, packed, d = planes
    upper, run = part >> 1, part & 1
    words = qs.cast(u32).at(part * 4).load(vector=4)
    masks = [word >> (upper * 4) for word in hmask.cast(u32).at(run * 4).load(vector=4)]
    scale_words = packed.cast(u32).load_run(0, 3)
    step = d.cast(f16).load().to(f32)
    runs = []
    for g in range(4):
        scales = _four_scales(scale_words[g // 2], scale_words[2], upper * 2 + g // 2)
        scale = step * _signed(k, scales, run * 8 + 16 * (g % 2)).to(f32)
        quants = [
            ((w >> 2 * g) & 0x03030303) | (shifted(m, 2 - g) & 0x04040404)
            for w, m in zip(words, masks, strict=True)
        ]
        values = [scale * (v - 4.0) for v in byte_floats(k, quants)]
        runs.append(DequantizedRun(upper * 128 + 32 * g + run * 16, values))
    return runs


def int8_groups(
    k: Builder, planes: Sequence[TilePlane], unit: Value
) -> tuple[packed_tile.Int8Group, packed_tile.Int8Group]:
    """Unpacks groups 2 * (unit % 2) and the next, of 128 columns, as 32 * (q - 4) in int8.

    The 128 columns are half h = unit / 2. See `packed_tile.Int8Groups`.
    """
    qs, hmask, packed, d = planes
    low = [word >> ((unit & 1) * 4) for word in qs.matrix((unit >> 1) * 32)]
    third = [~word >> (unit * 2) for word in hmask.matrix(0)]
    scales = [
        _four_scales(row.at((unit & 1) * 4).cast(u32).load(), row.at(8).cast(u32).load(), unit)
        for row in packed.rows()
    ]
    steps = [step * (1 / 32) for step in d.f16()]

    def group(i: int) -> packed_tile.Int8Group:
        words = [
            (shifted(q, 5 - 2 * i) & 0x60606060) | ((t << (7 - i)) & 0x80808080)
            for q, t in zip(low, third, strict=True)
        ]
        numbers = [
            [step * _signed(k, row, 16 * i + at).to(f32) for at in (0, 8)]
            for step, row in zip(steps, scales, strict=True)
        ]
        return packed_tile.Int8Group(unit * 2 + i, words, s8, list(zip(*numbers, strict=True)))

    return group(0), group(1)


FORMAT = BlockFormat(
    name="Q3_K",
    block_size=256,
    block_bytes=110,
    struct=(("hmask", 32), ("qs", 64), ("scales", 12), ("d", 2)),
    layout=(("qs", ("qs",)), ("hmask", ("hmask",)), ("scales", ("scales",)), ("d", ("d",))),
    f16_fields=("d",),
    weights=_weights,
    quant_bits=3,
    row=PackedRow,
    dequantize=dequantize,
    dequantize_threads=4,
    int8_tile=int8_groups,
    tuning=FormatTuning(
        gemv_lanes=4,
        gemv_rows=4,
        gemv_two_parts=_TWO_PARTS,
        gemm_tiles=1,
        gemm_few_rows=32,
        gemm_pair_rows=8,
        instruction_budgets={1: 5.0},
    ),
)
