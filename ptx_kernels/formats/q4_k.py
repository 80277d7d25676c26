"""Q4_K: 256 weights in 144 bytes; weight = d * scale[s] * q - dmin * min[s], sub-blocks s of 32.

Source: ggml, `block_q4_K`. Byte j of the 32-byte group c of `qs` holds weight 64c + j in its low nibble
and weight 64c + 32 + j in its high one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..ptx import Builder, Pointer, Value, Var, f32, s32, u32
from . import k_scales
from .base import BlockFormat, nibbles
from .dot import ActivationTile, Words, dp4a_chain
from .unpack import Run, affine, byte_floats, half


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    return k_scales.weights(field, low_bits(field["qs"], xp), xp)


def low_bits(qs: Any, xp: Any) -> Any:
    """uint8 (..., 128) -> the nibbles of the eight sub-blocks, uint8 (..., 8, 32); Q5_K's low bits lie so too."""
    groups = qs.reshape(*qs.shape[:-1], 4, 32)
    return nibbles(groups, xp).reshape(*groups.shape[:-2], 8, 32)


FORMAT = BlockFormat(
    name="Q4_K",
    block_size=256,
    block_bytes=144,
    struct=(("d", 2), ("dmin", 2), ("scales", 12), ("qs", 128)),
    layout=(("block", ("d", "dmin", "scales", "qs")),),  # 144 = 9 * 16: aligned as it lies
    half_fields=("d", "dmin"),
    weights=_weights,
)


class Tile(NamedTuple):
    """A lane's share, ready for dot products: a sub-block's quants * scale * d, less its min, are its weights."""

    low: Sequence[Words]  # quants of sub-block 2 * group, four a word
    high: Sequence[Words]  # quants of sub-block 2 * group + 1, or a multiple of them
    scales: tuple[Value, Value]  # of the low and the high sub-block, as u32
    d: Value
    minimums: list[Value]  # dmin * min of the sub-blocks whose min term is this lane's, f32


class PackedRow:
    """A lane's share of Q4_K rows: 128 / lanes bytes of nibbles of one 32-byte group (see `dot.PackedRow`).

    Of 4 lanes each has a whole group and so both of its sub-blocks; of 8 lanes two share a group, and each
    adds the min term of one sub-block. The min term needs no dot product: the activations' sums are known.
    """

    lanes: tuple[int, ...] = (4, 8)
    groups = 2
    block_words = 36  # u32 of a block
    quants_at = 4  # the first of its nibbles

    def __init__(
        self, k: Builder, planes: Sequence[Pointer], row: Value, block: Value, part: Value, lanes: int
    ) -> None:
        self._k = k
        self._runs = 8 // lanes  # 16-byte runs of nibbles
        group = part if lanes == 4 else part >> 1
        self._half: Value | None = None if lanes == 4 else part & 1
        words = planes[0].cast(u32)
        self._row_words = words.shape[1] * self.block_words
        self._header = words.at(row, block).moving()
        self._quants = words.at(row, block).at(part * (4 * self._runs)).moving()
        self.value_base = group * 64 if self._half is None else group * 64 + self._half * 16
        self.value_offsets: tuple[int, ...] = (0, 16, 32, 48) if lanes == 4 else (0, 32)
        self.group_base = group * 2
        self._scales = k_scales.PairReader(k, group, self._half)

    def load(self, row: int, block: int) -> tuple[Words, list[Words]]:
        at = row * self._row_words + block * self.block_words
        header = self._header.load(at, vector=4)
        return header, [self._quants.load(at + self.quants_at + 4 * i, vector=4) for i in range(self._runs)]

    def unpack(self, loaded: tuple[Words, list[Words]]) -> Tile:
        header, quants = loaded
        d, dmin = half(header[0], 0), half(header[0], 1)
        scales, minimums = self._scales.read(header[1:])
        return Tile(
            [[q & 0x0F0F0F0F for q in run] for run in quants],
            [[q & 0xF0F0F0F0 for q in run] for run in quants],  # 16 times the quants: nibbles where they lie
            ((scales & 0xFF) << 4, scales >> 8),
            d * (1 / 16),
            [dmin * m.to(f32) for m in minimums],
        )

    def dot(self, tile: Tile, x: ActivationTile, total: Var) -> None:
        k = self._k
        flat = [word for run in x.words for word in run]
        middle = len(flat) // 2
        products = []
        for quants, words, scale, x_scale in (
            (tile.low, flat[:middle], tile.scales[0], x.scales[0]),
            (tile.high, flat[middle:], tile.scales[1], x.scales[1]),
        ):
            dot = dp4a_chain(k, [q for run in quants for q in run], words, unsigned=True)
            products.append(((dot * scale.bits(s32)).to(f32), x_scale))
        (low, low_scale), (high, high_scale) = products
        k.accumulate(total, k.fma(high, high_scale, low * low_scale), tile.d)
        sums = x.sums if self._half is None else [k.select(self._half == 0, x.sums[0], x.sums[1])]
        for minimum, value in zip(tile.minimums, sums, strict=True):
            k.accumulate(total, minimum, -value)

    def advance(self, blocks: int) -> None:
        self._header.advance(self.block_words * blocks)
        self._quants.advance(self.block_words * blocks)


PARTS = 8  # threads that decode a block: 16 bytes of nibbles each


def unpack(
    k: Builder, planes: Sequence[Pointer], part: Value, high_bits: Sequence[Value] | None = None, quants_at: int = 16
) -> list[Run]:
    """32 weights of a block: 16 of sub-block 2 * (part // 2), 16 of the next (see `unpack.Unpack`).

    Q5_K, whose blocks differ by a fifth bit and by where the nibbles begin, gives `quants_at` and, as
    `high_bits`, four words whose bytes hold the fifth bits of sub-blocks 0 to 7 in bits 0 to 7.
    """
    group, run = part >> 1, part & 1
    block = planes[0].cast(u32)
    header = block.load(0, vector=4)
    words = block.at(part * 4).load(quants_at // 4, vector=4)
    d, dmin = half(header[0], 0), half(header[0], 1)
    scales, minimums = k_scales.PairReader(k, group).read(header[1:])
    runs = []
    for s, (scale, minimum) in enumerate(zip((scales & 0xFF, scales >> 8), minimums, strict=True)):
        quants = [(w >> 4 * s) & 0x0F0F0F0F for w in words]
        if high_bits is not None:
            fifth = [((bits >> (group * 2 + s)) & 0x01010101) << 4 for bits in high_bits]
            quants = [q | h for q, h in zip(quants, fifth, strict=True)]
        step, low = d * scale.to(f32), dmin * minimum.to(f32)
        runs.append(Run(group * 64 + run * 16 + 32 * s, affine(byte_floats(k, quants), step, low)))
    return runs
