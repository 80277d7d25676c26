"""IQ4_NL: 32 weights in 18 bytes; weight = d * TABLE[code], with steps that widen away from zero.

Source: ggml, `block_iq4_nl` and `kvalues_iq4nl`. The codes are stored like Q4_0's nibbles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..ptx import Builder, Pointer, Value, f16, f32, s8
from .base import BlockFormat, FormatTuning, f16_array
from .unpack import codebook_16, packed_tile
from .unpack.packed_block import DequantizedRun
from .unpack.packed_tile import TilePlane

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    return f16_array(field["d"]) * codebook_16.entries(TABLE, field["qs"], xp)


class PackedRow(codebook_16.PackedRow):
    """Reads a lane's share of IQ4_NL rows (see `packed_row.PackedRow`)."""

    table = TABLE


def dequantize(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DequantizedRun]:
    """Emits the decoding of a quantization block of 32 (see `packed_block.Dequantize`)."""
    qs, d = planes
    return codebook_16.dequantize(k, TABLE, qs, d.cast(f16).load().to(f32))


def int8_groups(
    k: Builder, planes: Sequence[TilePlane], unit: Value
) -> tuple[packed_tile.Int8Group, packed_tile.Int8Group]:
    """Unpacks quantization blocks 2 * unit and 2 * unit + 1 (see `packed_tile.Int8Groups`)."""
    qs, d = planes
    quants = codebook_16.fragments(k, TABLE, qs, unit)
    return packed_tile.block_pair(unit, quants, s8, d.f16_pairs(unit * 4))


FORMAT = BlockFormat(
    name="IQ4_NL",
    block_size=32,
    block_bytes=18,
    struct=(("d", 2), ("qs", 16)),
    layout=(("codes", ("qs",)), ("d", ("d",))),  # the plane names distinguish it from Q4_0
    f16_fields=("d",),
    weights=_weights,
    quant_bits=4,
    row=PackedRow,
    dequantize=dequantize,
    dequantize_threads=1,
    int8_tile=int8_groups,
    tuning=FormatTuning(instruction_budgets={1: 6.0}),
)
