"""Q4_1: 32 weights in 20 bytes; weight = d * q + m.

Source: ggml, `block_q4_1`. `qs` holds the quants like Q4_0's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..ptx import Builder, Pointer, Value, u8, u32
from . import q4_0
from .base import BlockFormat, FormatTuning, f16_array, nibbles
from .unpack import packed_tile
from .unpack.packed_block import DequantizedRun
from .unpack.packed_row import Run, Tile
from .unpack.packed_tile import TilePlane
from .unpack.packed_words import (
    ANCHOR,
    anchored_floats,
    byte_floats,
    f16_of,
    lower_nibbles,
    upper_nibbles,
)


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    quants = nibbles(field["qs"], xp).astype(np.float32)
    return f16_array(field["d"]) * quants + f16_array(field["m"])


class PackedRow(q4_0.PackedRow):
    """Reads a lane's share of Q4_1 rows: like Q4_0, with unsigned quants and a minimum.

    One of the lanes that share a quantization block adds the minimum.
    """

    scale_type = u32  # d and m

    def unpack(self, loaded: tuple[Any, ...]) -> Tile:
        k = self._k
        pair, words = loaded
        d, minimum = f16_of(pair), -f16_of(pair, 1)
        runs = upper_nibbles(words)
        if self._floats:
            halves = ([w >> 1 for w in run] for run in runs)  # below 128
            floats = [Run(anchored_floats(k, half), None, ANCHOR) for half in halves]
            return Tile(floats, d * (1 / 8), (minimum, minimum))
        if self._count < 4:
            minimum = k.select(self._part == 0, minimum, 0.0)
        return Tile([Run(run) for run in runs], d * (1 / 16), (minimum,))


def dequantize(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DequantizedRun]:
    """Emits the decoding of a quantization block of 32 (see `packed_block.Dequantize`)."""
    qs, dm = planes
    pair = dm.cast(u32).load()
    scale, offset = f16_of(pair), f16_of(pair, 1)
    quants = lower_nibbles(qs.cast(u32).load(vector=4))
    return [
        DequantizedRun(16 * i, [scale * v + offset for v in byte_floats(k, run)])
        for i, run in enumerate(quants)
    ]


def int8_groups(
    k: Builder, planes: Sequence[TilePlane], unit: Value
) -> tuple[packed_tile.Int8Group, packed_tile.Int8Group]:
    """Unpacks quantization blocks 2 * unit and 2 * unit + 1 as 16 * q.

    See `packed_tile.Int8Groups`.
    """
    qs, dm = planes
    quants = q4_0.fragment_nibbles(qs, unit)
    scales, offsets = zip(*(dm.f16_pairs(unit * 8 + 4 * i) for i in range(2)), strict=True)
    sixteenths = (packed_tile.scaled(scale, 1 / 16) for scale in scales)
    return packed_tile.block_pair(unit, quants, u8, sixteenths, offsets)


FORMAT = BlockFormat(
    name="Q4_1",
    block_size=32,
    block_bytes=20,
    struct=(("d", 2), ("m", 2), ("qs", 16)),
    layout=(("qs", ("qs",)), ("dm", ("d", "m"))),
    f16_fields=("d", "m"),
    weights=_weights,
    quant_bits=4,
    row=PackedRow,
    dequantize=dequantize,
    dequantize_threads=1,
    int8_tile=int8_groups,
    tuning=FormatTuning(instruction_budgets={1: 3.0}),
)
