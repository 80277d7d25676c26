"""Q4_0: 32 weights in 18 bytes; weight = d * (q - 8).

Source: ggml, `block_q4_0`. Byte j of `qs` holds weight j in its low nibble and weight 16 + j in its
high one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..ptx import Builder, Pointer, Value, f16, f32, s8, u32
from ..ptx.types import Type
from . import packed_tile
from .base import BlockFormat, half, nibbles
from .packed_row import Share, Tile, signed_run
from .words import DecodedRun, byte_floats


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    return half(field["d"]) * (nibbles(field["qs"], xp).astype(np.float32) - np.float32(8))


FORMAT = BlockFormat(
    name="Q4_0",
    block_size=32,
    block_bytes=18,
    struct=(("d", 2), ("qs", 16)),
    layout=(("qs", ("qs",)), ("d", ("d",))),
    half_fields=("d",),
    weights=_weights,
)


class PackedRow:
    """A lane's share of Q4_0 rows: 16 / lanes bytes of nibbles, and so as many weights of both
    halves of a block.

    Flipping a nibble's top bit in the upper half of a byte makes it 16 * (q - 8) as int8, so the
    offset costs nothing. Of one kind with Q5_0 and Q5_1, whose nibbles lie as these do (see
    `packed_row.PackedRow`).
    """

    scale_type: Type = (
        f16  # an element of the last plane: the block's scale, with or without its minimum
    )

    def __init__(self, k: Builder, planes: Sequence[Pointer], share: Share) -> None:
        self._k, self._floats, self._part = k, share.floats, share.part
        qs, scale = planes[0], planes[-1]
        length = 16 // share.lanes
        self._count = length // 4
        self._blocks = qs.shape[1]
        self._qs = qs.at(share.row, share.block, share.part * length).cast(u32).moving()
        self._scale = scale.at(share.row, share.block).cast(self.scale_type).moving()
        self.value_base = share.part * length
        self.runs: Sequence[tuple[int, int]] = ((0, length), (16, length))

    def load(self, row: int, block: int) -> tuple[Any, ...]:
        at = row * self._blocks + block
        return self._scale.load(at), self._qs.load_run(at * 4, self._count)

    def unpack(self, loaded: tuple[Any, ...]) -> Tile:
        d, words = loaded
        halves = [
            [(w & 0xF0F0F0F0) ^ 0x80808080 for w in half]
            for half in ([w << 4 for w in words], words)
        ]
        return Tile(
            [signed_run(self._k, h, floats=self._floats) for h in halves],
            d.to(f32) * (1 / 16),
            signed=True,
        )

    def advance(self, blocks: int) -> None:
        self._qs.advance(4 * blocks)
        self._scale.advance(blocks)


PARTS = 1  # threads that decode a block


def unpack(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DecodedRun]:
    """All 32 weights of a block (see `words.Unpack`)."""
    qs, d = planes
    scale = d.cast(f16).load().to(f32)
    words = qs.cast(u32).load(vector=4)
    return [
        DecodedRun(
            16 * high,
            [
                scale * (v - 8.0)
                for v in byte_floats(k, [(w >> 4 * high) & 0x0F0F0F0F for w in words])
            ],
        )
        for high in range(2)
    ]


def fragments_of(
    k: Builder, planes: Sequence[Pointer], unit: Value, start: Value, blocks: int
) -> tuple[packed_tile.Group, packed_tile.Group]:
    """Blocks 2 * unit and 2 * unit + 1 as 16 * (q - 8) in int8 (see `packed_tile.Fragments`)."""
    qs, d = planes
    words = packed_tile.matrix(
        k, qs, unit * 32
    )  # two of each block: its low nibbles, then its high ones
    nibbles_ = [
        [w << 4 for w in words[2 * i : 2 * i + 2]] + list(words[2 * i : 2 * i + 2])
        for i in range(2)
    ]
    low, high = (
        packed_tile.Group(
            unit * 2 + i,
            [(w & 0xF0F0F0F0) ^ 0x80808080 for w in nibbles_[i]],
            s8,
            [packed_tile.scaled(scale, 1 / 16)],
        )
        for i, scale in enumerate(packed_tile.half_pairs(k, d, unit * 4))
    )
    return low, high
