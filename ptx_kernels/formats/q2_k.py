"""Q2_K: 256 weights in 84 bytes; weight = d * scale[i // 16] * q - dmin * min[i // 16].

Source: ggml, `block_q2_K`. Quants are stored as described in `two_bits`. A byte of `scales` holds a
scale in its low four bits and a min in its high four.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..ptx import Builder, Pointer, Value, f32, s32, u8, u32
from .base import BlockFormat, FormatTuning, f16_array
from .unpack import packed_tile, two_bits
from .unpack.packed_block import DequantizedRun
from .unpack.packed_row import Run, Share, Tile
from .unpack.packed_tile import TilePlane
from .unpack.packed_words import Words, affine, byte_floats, f16_of, shifted


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    quants = two_bits.quants(field["qs"], xp).astype(np.float32)
    scales = field["scales"]
    step = f16_array(field["d"]) * (scales & 15).astype(np.float32)
    low = f16_array(field["dmin"]) * (scales >> 4).astype(np.float32)
    blocks = scales.shape[:-1]
    values = step[..., None] * quants.reshape(*blocks, 16, 16) - low[..., None]
    return values.reshape(*blocks, 256)


class PackedRow:
    """Reads a lane's share of Q2_K rows (see `two_bits.LowBits`, `packed_row.PackedRow`).

    Group g's quants are not shifted: a byte is 4^g times the quant.
    """

    def __init__(self, k: Builder, planes: Sequence[Pointer], share: Share) -> None:
        self._k, self._floats = k, share.floats
        qs, scales, dm = planes
        self._low = low = two_bits.LowBits(qs, share)
        self.value_base, self.runs = low.value_base, low.runs
        self._blocks = qs.shape[1]
        self._scales = scales.at(share.row, share.block, low.unit * 4).cast(u32).moving()
        self._dm = dm.at(share.row, share.block).cast(u32).moving()

    def load(self, row: int, block: int) -> tuple[Words, Words, Value]:
        at = row * self._blocks + block
        scales = self._scales.load_run(at * 4, self._low.groups // 2)
        return self._low.load(at), scales, self._dm.load(at)

    def unpack(self, loaded: tuple[Words, Words, Value]) -> Tile:
        k = self._k
        words, scales, dm = loaded
        words = self._low.aligned(words)
        # bytes 0 and 2: of the groups in a word
        scales = [word >> (self._low.half * 8) for word in scales]
        runs, minimums = [], []
        for g in range(self._low.groups):
            quants = [word & (0x03030303 << 2 * g) for word in words]
            word, bit = scales[g // 2], g % 2 * 16
            scale = shifted(word, -bit) & 15
            if self._floats:
                whole = [shifted(word, -2 * g) for word in quants]
                runs.append(Run(byte_floats(k, whole), scale.to(f32)))
            else:
                runs.append(Run(quants, scale.bits(s32), unit=0.25**g))
            minimums.append(k.bit_field(word, bit + 4, 4).to(f32))
        return Tile(runs, f16_of(dm), minimums, minimum_d=f16_of(dm, 1))

    def advance(self, blocks: int) -> None:
        self._low.advance(blocks)
        self._scales.advance(4 * blocks)
        self._dm.advance(blocks)


def dequantize(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DequantizedRun]:
    """Emits the decoding of 16 weights of each group in a block's half h = part / 2.

    See `packed_block.Dequantize`.
    """
    qs, scales, dm = planes
    upper, run = part >> 1, part & 1
    words = qs.cast(u32).at(part * 4).load(vector=4)
    pairs = [word >> (run * 8) for word in scales.cast(u32).at(upper * 2).load(vector=2)]
    both = dm.cast(u32).load()
    d, dmin = f16_of(both), f16_of(both, 1)
    runs = []
    for g in range(4):
        pair, bit = pairs[g // 2], g % 2 * 16
        scale = d * k.bit_field(pair, bit, 4).to(f32)
        minimum = dmin * k.bit_field(pair, bit + 4, 4).to(f32)
        quants = byte_floats(k, [(word >> 2 * g) & 0x03030303 for word in words])
        first = upper * 128 + 32 * g + run * 16
        runs.append(DequantizedRun(first, affine(quants, scale, minimum)))
    return runs


def int8_groups(
    k: Builder, planes: Sequence[TilePlane], unit: Value
) -> tuple[packed_tile.Int8Group, packed_tile.Int8Group]:
    """Unpacks groups 2 * (unit % 2) and the next, of the 128 columns h = unit / 2.

    See `packed_tile.Int8Groups`.
    """
    qs, scales, dm = planes
    low = [word >> ((unit & 1) * 4) for word in qs.matrix((unit >> 1) * 32)]
    bytes_ = [row.at(unit * 4).cast(u32).load() for row in scales.rows()]
    pairs = [row.cast(u32).load() for row in dm.rows()]
    steps = [(f16_of(pair), -f16_of(pair, 1)) for pair in pairs]

    def group(i: int) -> packed_tile.Int8Group:
        def pair_of(number: int) -> packed_tile.Pair:  # scales of 16 columns of both rows
            bit = 16 * i + 8 * number
            low, high = (
                d * (0.25**i * k.bit_field(word, bit, 4).to(f32))
                for word, (d, _) in zip(bytes_, steps, strict=True)
            )
            return low, high

        minimums = [
            k.permute((word >> 4) & 0x0F0F0F0F, k.const(u32, 0), 0x1111 * (2 * i + number))
            for number in range(2)
            for word in bytes_
        ]
        return packed_tile.Int8Group(
            unit * 2 + i,
            [word & (0x03030303 << 2 * i) for word in low],
            u8,
            [pair_of(0), pair_of(1)],
            (steps[0][1], steps[1][1]),
            minimums,
        )

    return group(0), group(1)


FORMAT = BlockFormat(
    name="Q2_K",
    block_size=256,
    block_bytes=84,
    struct=(("scales", 16), ("qs", 64), ("d", 2), ("dmin", 2)),
    layout=(("qs", ("qs",)), ("scales", ("scales",)), ("dm", ("d", "dmin"))),
    f16_fields=("d", "dmin"),
    weights=_weights,
    quant_bits=2,
    row=PackedRow,
    dequantize=dequantize,
    dequantize_threads=4,
    int8_tile=int8_groups,
    tuning=FormatTuning(
        gemv_lanes=4,
        gemv_rows=4,
        gemv_sum_dots=1,
        gemv_resident_blocks=4,
        gemm_tiles=1,
        gemm_few_rows=32,
        gemm_pair_rows=0,
        instruction_budgets={1: 6.0},
    ),
)
