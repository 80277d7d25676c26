"""Q8_0: 32 weights in 34 bytes; weight = d * q, q int8. Source: ggml, `block_q8_0`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..ptx import Builder, Pointer, Value, f16, f32, s8, u32
from .base import BlockFormat, FormatTuning, f16_array
from .unpack import packed_tile
from .unpack.packed_block import DequantizedRun
from .unpack.packed_row import Share, Tile, signed_run
from .unpack.packed_tile import TilePlane
from .unpack.packed_words import signed_byte_floats


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    return f16_array(field["d"]) * field["qs"].view(np.int8).astype(np.float32)


class PackedRow:
    """Reads a lane's share of Q8_0 rows: 32 / lanes weights of each quantization block.

    See `packed_row.PackedRow`.
    """

    def __init__(self, k: Builder, planes: Sequence[Pointer], share: Share) -> None:
        self._k, self._floats = k, share.floats
        qs, d = planes
        length = 32 // share.lanes
        self._count = length // 4
        self._blocks = qs.shape[1]
        self.value_base = share.part * length
        self.runs: Sequence[tuple[int, int]] = ((0, length),)
        self._qs = qs.at(share.row, share.block, self.value_base).cast(u32).moving()
        self._d = d.at(share.row, share.block).cast(f16).moving()

    def load(self, row: int, block: int) -> tuple[list[Value], Value]:
        at = row * self._blocks + block
        return self._qs.load_run(at * 8, self._count), self._d.load(at)

    def unpack(self, loaded: tuple[list[Value], Value]) -> Tile:
        words, d = loaded
        return Tile([signed_run(self._k, words, floats=self._floats)], d.to(f32), signed=True)

    def advance(self, blocks: int) -> None:
        self._qs.advance(8 * blocks)
        self._d.advance(blocks)


def dequantize(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DequantizedRun]:
    """Emits the decoding of 16 weights of a quantization block (see `packed_block.Dequantize`)."""
    qs, d = planes
    scale = d.cast(f16).load().to(f32)
    words = qs.cast(u32).at(part * 4).load(vector=4)
    return [DequantizedRun(part * 16, [scale * v for v in signed_byte_floats(k, words)])]


def int8_groups(
    k: Builder, planes: Sequence[TilePlane], unit: Value
) -> tuple[packed_tile.Int8Group, packed_tile.Int8Group]:
    """Unpacks quantization blocks 2 * unit and 2 * unit + 1 (see `packed_tile.Int8Groups`)."""
    qs, d = planes
    quants = (qs.matrix(unit * 64 + 32 * i) for i in range(2))
    return packed_tile.block_pair(unit, quants, s8, d.f16_pairs(unit * 4))


FORMAT = BlockFormat(
    name="Q8_0",
    block_size=32,
    block_bytes=34,
    struct=(("d", 2), ("qs", 32)),
    layout=(("qs", ("qs",)), ("d", ("d",))),
    f16_fields=("d",),
    weights=_weights,
    quant_bits=8,
    row=PackedRow,
    dequantize=dequantize,
    dequantize_threads=2,
    int8_tile=int8_groups,
    tuning=FormatTuning(gemv_lanes=16, gemm_tiles=1, instruction_budgets={1: 1.0}),
)
