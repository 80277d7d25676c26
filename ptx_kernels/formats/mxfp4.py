"""MXFP4: 32 weights in 17 bytes; weight = 2^(e - 128) * TABLE[code].

Source: ggml, `block_mxfp4` and `kvalues_mxfp4`; OCP Microscaling Formats v1.0. A code is an fp4
value with two bits of exponent and one of mantissa; TABLE holds twice its value. e is a scale of
type e8m0, where 255 is NaN. The codes are stored like Q4_0's nibbles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..ptx import Builder, Pointer, Value, f32, s8, u8, u32
from .base import BlockFormat, FormatTuning
from .unpack import codebook_16, packed_tile
from .unpack.packed_block import DequantizedRun
from .unpack.packed_tile import TilePlane

TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    """Multiplies codebook values by scales, exactly even for subnormal weights.

    XLA on a CPU flushes subnormal products. The product therefore uses two powers of two, neither
    of which is subnormal. Subnormal weights, which have `e` 0 or 1, are built as bits: multiples of
    2^-149.
    """
    e = field["e"].astype(np.int32)
    entries, low = codebook_16.entries(TABLE, field["qs"], xp), e >> 1

    def power(exponent: Any) -> Any:  # 2^(exponent - 64)
        return ((exponent + 63) << 23).view(np.float32)

    products = (entries * power(low) * power(e - low)).view(np.int32)
    quants = entries.astype(np.int32)
    magnitudes = xp.abs(quants) << (e & 1)  # times 2^-128, if e is below 2
    subnormal = (e < 2) & (magnitudes < 4)
    bits = xp.where(subnormal, magnitudes << 21 | quants & np.int32(-1 << 31), products)
    return bits.view(np.float32)


def _scale(k: Builder, e: Value) -> Value:
    """Emits 2^(e - 128), f32, for a u32 e below 256."""
    return k.select(e < 2, k.const(u32, 0x200000) << e, (e - 1) << 23).bits(f32)


class PackedRow(codebook_16.PackedRow):
    """Reads a lane's share of MXFP4 rows (see `packed_row.PackedRow`)."""

    table = TABLE
    scale_type = u8

    def scale(self, loaded: Value) -> Value:
        return _scale(self._k, loaded.to(u32))


def dequantize(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DequantizedRun]:
    """Emits the decoding of a quantization block of 32 (see `packed_block.Dequantize`)."""
    qs, e = planes
    return codebook_16.dequantize(k, TABLE, qs, _scale(k, e.load().to(u32)))


def int8_groups(
    k: Builder, planes: Sequence[TilePlane], unit: Value
) -> tuple[packed_tile.Int8Group, packed_tile.Int8Group]:
    """Unpacks quantization blocks 2 * unit and 2 * unit + 1 (see `packed_tile.Int8Groups`)."""
    qs, e = planes
    quants = codebook_16.fragments(k, TABLE, qs, unit)
    scales = [(_scale(k, g), _scale(k, other)) for g, other in e.byte_pairs(unit * 2)]
    return packed_tile.block_pair(unit, quants, s8, scales, wide=True)


FORMAT = BlockFormat(
    name="MXFP4",
    block_size=32,
    block_bytes=17,
    struct=(("e", 1), ("qs", 16)),
    layout=(("codes", ("qs",)), ("e", ("e",))),
    f16_fields=(),
    e8m0_fields=("e",),
    weights=_weights,
    quant_bits=4,
    row=PackedRow,
    dequantize=dequantize,
    dequantize_threads=1,
    int8_tile=int8_groups,
    tuning=FormatTuning(instruction_budgets={1: 6.0}),
)
