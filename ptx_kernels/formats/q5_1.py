"""Q5_1: 32 weights in 24 bytes; weight = d * q + m.

Source: ggml, `block_q5_1`. `qh` and `qs` hold the quants like Q5_0's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..ptx import Builder, Pointer, Value, u8, u32
from . import q5_0
from .base import BlockFormat, FormatTuning, f16_array
from .unpack import packed_tile
from .unpack.packed_block import DequantizedRun
from .unpack.packed_row import Run, Tile
from .unpack.packed_tile import TilePlane
from .unpack.packed_words import ANCHOR, anchored_floats, f16_of


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    return f16_array(field["d"]) * q5_0.quants(field, xp) + f16_array(field["m"])


class PackedRow(q5_0.PackedRow):
    """Reads a lane's share of Q5_1 rows: like Q5_0, with unsigned quants and a minimum.

    One of the lanes that share a quantization block adds the minimum.
    """

    scale_type = u32  # d and m

    def unpack(self, loaded: tuple[Any, ...]) -> Tile:
        k = self._k
        pair, words, fifth = loaded
        d, minimum = f16_of(pair), -f16_of(pair, 1)
        if self._floats:
            runs = [
                Run(anchored_floats(k, fours), None, ANCHOR)
                for fours in self.quant_bytes(words, fifth, 2)
            ]
            return Tile(runs, d * 0.25, (minimum, minimum))
        if self._count < 4:
            minimum = k.select(self._part == 0, minimum, 0.0)
        return Tile([Run(quants) for quants in self.quant_bytes(words, fifth, 0)], d, (minimum,))


def dequantize(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DequantizedRun]:
    """Emits the decoding of a quantization block of 32 (see `packed_block.Dequantize`)."""
    qs, qh, dm = planes
    pair = dm.cast(u32).load()
    scale, offset = f16_of(pair), f16_of(pair, 1)
    return [
        DequantizedRun(16 * i, [scale * v + offset for v in values])
        for i, values in enumerate(q5_0.unpack_block(k, qs, qh))
    ]


def int8_groups(
    k: Builder, planes: Sequence[TilePlane], unit: Value
) -> tuple[packed_tile.Int8Group, packed_tile.Int8Group]:
    """Unpacks quantization blocks 2 * unit and 2 * unit + 1 (see `packed_tile.Int8Groups`)."""
    qs, qh, dm = planes
    quants = q5_0.fragment_bytes(k, qs, qh, unit, 0, False)
    scales, offsets = zip(*(dm.f16_pairs(unit * 8 + 4 * i) for i in range(2)), strict=True)
    return packed_tile.block_pair(unit, quants, u8, scales, offsets)


FORMAT = BlockFormat(
    name="Q5_1",
    block_size=32,
    block_bytes=24,
    struct=(("d", 2), ("m", 2), ("qh", 4), ("qs", 16)),
    layout=(("qs", ("qs",)), ("qh", ("qh",)), ("dm", ("d", "m"))),
    f16_fields=("d", "m"),
    weights=_weights,
    quant_bits=5,
    row=PackedRow,
    dequantize=dequantize,
    dequantize_threads=1,
    int8_tile=int8_groups,
    tuning=FormatTuning(gemm_tiles=1, instruction_budgets={1: 4.0}),
)
