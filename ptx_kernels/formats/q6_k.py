"""Q6_K: 256 weights in 210 bytes; weight = d * scale[s] * (q - 32), int8 scales of sub-blocks s of 16.

Source: ggml, `block_q6_K`. The block has two halves h of 128 weights, each of four groups g of 32.
Weight 128h + 32g + j takes its low four bits from byte 64h + 32(g % 2) + j of `ql` (low nibble for
g < 2, high for g >= 2) and its high two from bits 2g of byte 32h + j of `qh`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..ptx import Builder, Pointer, Value, Var, f16, f32, s8, s32, u32
from .base import BlockFormat, bits, half
from .dot import ActivationTile, Words, dp4a_chain
from .unpack import Run, byte_floats


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    blocks = field["ql"].shape[:-1]
    low = bits(field["ql"].reshape(*blocks, 2, 64), 2, 4, xp).reshape(*blocks, 256)
    high = bits(field["qh"].reshape(*blocks, 2, 32), 4, 2, xp).reshape(*blocks, 256)
    quants = (low | (high << 4)).astype(np.float32) - np.float32(32)
    step = half(field["d"]) * field["scales"].view(np.int8).astype(np.float32)
    weights = step[..., None] * quants.reshape(*blocks, 16, 16)
    return weights.reshape(*blocks, 256)


FORMAT = BlockFormat(
    name="Q6_K",
    block_size=256,
    block_bytes=210,
    struct=(("ql", 128), ("qh", 64), ("scales", 16), ("d", 2)),
    layout=(("ql", ("ql",)), ("qh", ("qh",)), ("scales", ("scales",)), ("d", ("d",))),
    half_fields=("d",),
    weights=_weights,
)


class _Tile(NamedTuple):
    quants: Sequence[Words]  # 4 * (q - 32) as int8, of the four groups of 32
    scales: list[Value]  # s32, of the same
    d: Value  # d / 4


class PackedRow:
    """A lane's share of Q6_K rows: 16 weights of each of the four groups of one half (see `dot.PackedRow`).

    Lane `part` of 4 has half h = part // 2 and values 16 * (part % 2) to + 15 of its groups. A quant is put into
    the upper six bits of its byte, and its top bit flipped: that byte is 4 * (q - 32) as int8, so the offset of 32
    costs neither a subtraction nor a dot product with ones.
    """

    lanes: tuple[int, ...] = (4,)
    groups = 4
    value_offsets: tuple[int, ...] = (0, 32, 64, 96)

    def __init__(
        self, k: Builder, planes: Sequence[Pointer], row: Value, block: Value, part: Value, lanes: int
    ) -> None:
        self._k = k
        half, run = part >> 1, part & 1
        ql, qh, scales, d = planes
        self._blocks = ql.shape[1]
        self._ql = ql.at(row, block, half * 64 + run * 16).cast(u32).moving()
        self._qh = qh.at(row, block, half * 32 + run * 16).cast(u32).moving()
        self._scales = scales.at(row, block, half * 8).cast(u32).moving()
        self._d = d.at(row, block).cast(f16).moving()
        self._scale_bit = run * 8
        self.value_base = half * 128 + run * 16
        self.group_base = half * 4

    def load(self, row: int, block: int) -> tuple[Words, Words, Words, Words, Value]:
        at = row * self._blocks + block
        return (
            self._ql.load(at * 32, vector=4),
            self._ql.load(at * 32 + 8, vector=4),
            self._qh.load(at * 16, vector=4),
            self._scales.load(at * 4, vector=2),
            self._d.load(at),
        )

    def unpack(self, loaded: tuple[Words, Words, Words, Words, Value]) -> _Tile:
        k = self._k
        first, second, high, scales, d = loaded
        flipped = [word ^ 0xAAAAAAAA for word in high]  # the upper bit of every pair
        quants = []
        for group, low in enumerate((first, second, first, second)):
            words = []
            for nibbles_, pairs in zip(low, flipped, strict=True):
                upper = pairs << (6 - 2 * group) if group < 3 else pairs
                lower = nibbles_ << 2 if group < 2 else nibbles_ >> 2
                words.append((lower & 0x3C3C3C3C) | (upper & 0xC0C0C0C0))
            quants.append(words)
        # groups g = 0..3 have sub-blocks 2g + run of this half: bytes 2g + run of its eight scales
        numbers = [
            k.instruction("bfe.s32", scales[g // 2].bits(s32), self._scale_bit + 16 * (g % 2), 8) for g in range(4)
        ]
        return _Tile(quants, numbers, d.to(f32) * 0.25)

    def dot(self, tile: _Tile, x: ActivationTile, total: Var) -> None:
        k = self._k
        part: Any = None
        for quants, scale, words, x_scale in zip(tile.quants, tile.scales, x.words, x.scales, strict=True):
            product = (dp4a_chain(k, quants, words, unsigned=False) * scale).to(f32)
            part = product * x_scale if part is None else k.fma(product, x_scale, part)
        k.accumulate(total, part, tile.d)

    def advance(self, blocks: int) -> None:
        self._ql.advance(32 * blocks)
        self._qh.advance(16 * blocks)
        self._scales.advance(4 * blocks)
        self._d.advance(blocks)


PARTS = 8  # threads that decode a block: 16 bytes of ql each


def unpack(k: Builder, planes: Sequence[Pointer], part: Value) -> list[Run]:
    """32 weights of a block: 16 of group g = part / 2 % 2 of half part / 4, 16 of group g + 2 (see `unpack.Unpack`)."""
    ql, qh, scales, d = planes
    half_, group, run = part >> 2, (part >> 1) & 1, part & 1
    words = ql.cast(u32).at(part * 4).load(vector=4)
    pairs = qh.cast(u32).at(half_ * 8 + run * 4).load(vector=4)
    step = d.cast(f16).load().to(f32)
    runs = []
    for s in range(2):  # low nibbles, then high ones
        top = [((p >> (group * 2 + 4 * s)) & 0x03030303) << 4 for p in pairs]
        quants = [((w >> 4 * s) & 0x0F0F0F0F) | t for w, t in zip(words, top, strict=True)]
        scale = scales.cast(s8).at(half_ * 8 + group * 2 + run).load(4 * s).to(f32)
        values = [step * scale * (v - 32.0) for v in byte_floats(k, quants)]
        runs.append(Run(half_ * 128 + group * 32 + run * 16 + 64 * s, values))
    return runs
