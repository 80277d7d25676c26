"""IQ4_XS: 256 weights in 136 bytes; weight = d * (scale[b] - 32) * TABLE[code], 8 sub-blocks b.

Source: ggml, `block_iq4_xs`. Sub-block b of 32 weights has 16 bytes of codes, stored like Q4_0's
nibbles. Its scale has six bits: the low four in nibble b of `scales_l`, the high two in bits 2b of
`scales_h`, a little-endian 16-bit word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..ptx import Builder, Pointer, Value, f32, s8, s32, u32
from .base import BlockFormat, FormatTuning, bits, f16_array
from .iq4_nl import TABLE
from .unpack import codebook_16, packed_tile
from .unpack.packed_block import DequantizedRun
from .unpack.packed_row import Share, Tile, signed_run
from .unpack.packed_tile import TilePlane
from .unpack.packed_words import Words, f16_of, looked_up


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    leading = field["qs"].shape[:-1]
    low = bits(field["scales_l"], 2, 4, xp).swapaxes(-1, -2).reshape(*leading, 8)
    high = bits(field["scales_h"], 4, 2, xp).swapaxes(-1, -2).reshape(*leading, 8)
    scale = f16_array(field["d"]) * ((low | (high << 4)).astype(np.float32) - np.float32(32))
    values = scale[..., None] * codebook_16.entries(TABLE, field["qs"].reshape(*leading, 8, 16), xp)
    return values.reshape(*leading, 256)


def _scale(k: Builder, head: Words, block: Value) -> Value:
    """Emits scale - 32 of a sub-block, s32, from the header's two words."""
    low, high = (head[1] >> (block * 4)) & 15, (head[0] >> (block * 2 + 12)) & 0x30
    return (low | high).bits(s32) - 32


class PackedRow:
    """Reads a lane's share of IQ4_XS rows: 128 / lanes bytes of codes.

    With 4 lanes, each has two sub-blocks of 32. With more, lanes / 8 lanes share one. See
    `packed_row.PackedRow`.
    """

    def __init__(self, k: Builder, planes: Sequence[Pointer], share: Share) -> None:
        self._k, self._floats = k, share.floats
        qs, head = planes
        length = min(128 // share.lanes, 16)  # bytes of a run
        shares = 16 // length  # lanes that share a sub-block
        self._count = 32 // share.lanes  # words
        first = share.part // shares * max(8 // share.lanes, 1)
        blocks = range(max(8 // share.lanes, 1))
        self._numbers = [first + i for i in blocks]
        self.value_base = first * 32 + share.part % shares * length
        self.runs: Sequence[tuple[int, int]] = tuple(
            (32 * i + at, length) for i in blocks for at in (0, 16)
        )
        self._blocks = qs.shape[1]
        self._qs = qs.at(share.row, share.block, share.part * (4 * self._count)).cast(u32).moving()
        self._head = head.at(share.row, share.block).cast(u32).moving()

    def load(self, row: int, block: int) -> tuple[Words, Words]:
        at = row * self._blocks + block
        return self._head.load_run(at * 2, 2), self._qs.load_run(at * 32, self._count)

    def unpack(self, loaded: tuple[Words, Words]) -> Tile:
        k = self._k
        head, words = loaded
        runs, count = [], self._count // len(self._numbers)
        for i, number in enumerate(self._numbers):
            scale = _scale(k, head, number)
            for quants in looked_up(k, TABLE, words[i * count : (i + 1) * count]):
                runs.append(signed_run(k, quants, scale, floats=self._floats))
        return Tile(runs, f16_of(head[0]), signed=True)

    def advance(self, blocks: int) -> None:
        self._qs.advance(32 * blocks)
        self._head.advance(2 * blocks)


def dequantize(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DequantizedRun]:
    """Emits the decoding of one sub-block of 32 weights (see `packed_block.Dequantize`)."""
    qs, head = planes
    words = head.cast(u32).load(vector=2)
    scale = f16_of(words[0]) * _scale(k, words, part).to(f32)
    return codebook_16.dequantize(k, TABLE, qs.at(part * 16), scale, part * 32)


def int8_groups(
    k: Builder, planes: Sequence[TilePlane], unit: Value
) -> tuple[packed_tile.Int8Group, packed_tile.Int8Group]:
    """Unpacks sub-blocks 2 * unit and 2 * unit + 1 (see `packed_tile.Int8Groups`)."""
    qs, head = planes
    quants = codebook_16.fragments(k, TABLE, qs, unit)
    heads = [row.cast(u32).load(vector=2) for row in head.rows()]

    def scales(block: Value) -> packed_tile.Pair:
        low, high = (f16_of(words[0]) * _scale(k, words, block).to(f32) for words in heads)
        return low, high

    low, high = (
        packed_tile.Int8Group(unit * 2 + i, quants[i], s8, [scales(unit * 2 + i)]) for i in range(2)
    )
    return low, high


FORMAT = BlockFormat(
    name="IQ4_XS",
    block_size=256,
    block_bytes=136,
    struct=(("d", 2), ("scales_h", 2), ("scales_l", 4), ("qs", 128)),
    layout=(("codes", ("qs",)), ("head", ("d", "scales_h", "scales_l"))),
    f16_fields=("d",),
    weights=_weights,
    quant_bits=4,
    row=PackedRow,
    dequantize=dequantize,
    dequantize_threads=8,
    int8_tile=int8_groups,
    tuning=FormatTuning(instruction_budgets={1: 6.0}),
)
