"""Q5_K: 256 weights in 176 bytes; weight = d * scale[s] * q - dmin * min[s], sub-blocks s of 32.

Source: ggml, `block_q5_K`. `qs` holds the low four bits as in Q4_K; bit s of `qh[j]` is the fifth
bit of weight 32s + j.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..ptx import Builder, Pointer, Value, u8, u32
from . import q4_k
from .base import BlockFormat, FormatTuning, bits
from .unpack import k_scales, packed_tile
from .unpack.packed_block import DequantizedRun
from .unpack.packed_row import Share
from .unpack.packed_tile import F16Tile, TilePlane
from .unpack.packed_words import Words


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    return k_scales.weights(
        field, q4_k.low_bits(field["qs"], xp) | (bits(field["qh"], 8, 1, xp) << 4), xp
    )


class PackedRow(q4_k.PackedRow):
    """Reads a lane's share of Q5_K rows: like Q4_K, with the fifth bits of its nibbles."""

    block_words = 44
    quants_at = 12

    def __init__(self, k: Builder, planes: Sequence[Pointer], share: Share) -> None:
        super().__init__(k, planes, share)
        self._fifth = (
            planes[0].cast(u32).at(share.row, share.block).at(self._share * self._count).moving()
        )
        self._shift = self._group * 2  # bit of the low sub-block; the high one uses the next bit

    def load(self, row: int, block: int) -> tuple[Words, Words, Words]:  # type: ignore[override]
        at = row * self._row_words + block * self.block_words
        return *super().load(row, block), self._fifth.load_run(at + 4, self._count)

    def quant_bytes(  # type: ignore[override]
        self, quants: Words, fifth: Words
    ) -> tuple[tuple[Words, Words], tuple[int, int]]:
        both = [h >> self._shift for h in fifth]
        low = [
            (q & 0x0F0F0F0F) + ((b & 0x01010101) << 4) for q, b in zip(quants, both, strict=True)
        ]
        high = [
            ((q >> 4) & 0x0F0F0F0F) + ((b & 0x02020202) << 3)
            for q, b in zip(quants, both, strict=True)
        ]
        return (low, high), (1, 1)

    def seven_bits(  # type: ignore[override]
        self, quants: Words, fifth: Words
    ) -> tuple[tuple[Words, Words], int]:
        (low, high), _ = self.quant_bytes(quants, fifth)
        return ([q << 2 for q in low], [q << 2 for q in high]), 4

    def advance(self, blocks: int) -> None:
        super().advance(blocks)
        self._fifth.advance(self.block_words * blocks)


def dequantize(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DequantizedRun]:
    """Emits the decoding of 32 weights of a block, the same weights as `q4_k.dequantize`.

    See `packed_block.Dequantize`.
    """
    fifth_bits = planes[0].cast(u32).at((part & 1) * 4).load(4, vector=4)
    return q4_k.dequantize(k, planes, part, high_bits=fifth_bits, quants_at=48)


def _quants(k: Builder, plane: TilePlane, unit: Value) -> tuple[Words, Words]:
    """Returns the bytes of sub-blocks 2 * unit and 2 * unit + 1 as operand A."""
    fifth = [word >> (unit * 2) for word in plane.matrix(16)]
    words = plane.matrix(unit * 32 + 48)
    low = [(q & 0x0F0F0F0F) | ((b << 4) & 0x10101010) for q, b in zip(words, fifth, strict=True)]
    high = [
        ((q >> 4) & 0x0F0F0F0F) | ((b << 3) & 0x10101010) for q, b in zip(words, fifth, strict=True)
    ]
    return low, high


def int8_groups(
    k: Builder, planes: Sequence[TilePlane], unit: Value
) -> tuple[packed_tile.Int8Group, packed_tile.Int8Group]:
    """Unpacks sub-blocks 2 * unit and 2 * unit + 1 (see `packed_tile.Int8Groups`)."""
    low, high = _quants(k, planes[0], unit)
    low_scales, high_scales = q4_k.scales(k, planes[0], unit)
    return (
        packed_tile.Int8Group(unit * 2, low, u8, [low_scales]),
        packed_tile.Int8Group(unit * 2 + 1, high, u8, [high_scales]),
    )


def f16_groups(
    k: Builder, planes: Sequence[TilePlane], unit: Value
) -> tuple[packed_tile.F16Group, packed_tile.F16Group]:
    """Reads the sub-blocks of `int8_groups` as f16."""
    low, high = _quants(k, planes[0], unit)
    low_steps, high_steps = q4_k.steps(k, planes[0], unit, (1, 1))
    return (
        packed_tile.F16Group(unit * 2, low, 0x64, [low_steps]),
        packed_tile.F16Group(unit * 2 + 1, high, 0x64, [high_steps]),
    )


FORMAT = BlockFormat(
    name="Q5_K",
    block_size=256,
    block_bytes=176,
    struct=(("d", 2), ("dmin", 2), ("scales", 12), ("qh", 32), ("qs", 128)),
    layout=(("block", ("d", "dmin", "scales", "qh", "qs")),),  # 176 = 11 * 16: aligned as stored
    f16_fields=("d", "dmin"),
    weights=_weights,
    quant_bits=5,
    row=PackedRow,
    broadcast_header=True,
    dequantize=dequantize,
    dequantize_threads=8,
    int8_tile=int8_groups,
    int8_minimums=q4_k.int8_minimums,
    f16_tile=F16Tile(f16_groups, q4_k.block_scales),
    tuning=FormatTuning(
        gemv_resident_blocks=4,
        gemm_f16_rows=48,
        int8_issue_slots=18.1,
        instruction_budgets={1: 4.0},
    ),
)
