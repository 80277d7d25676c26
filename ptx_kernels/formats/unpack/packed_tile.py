"""A warp's view of packed rows, as GEMM reads them: 16 rows of 256 columns in shared memory.

A tile splits into four units of two groups of 32 columns each, those that share bytes. `ldmatrix`
hands out packed bytes just as mma wants the quants in them, four columns of rows g and g + 8 a lane
(g = lane / 4), so that quants are unpacked where they lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ...ptx import Builder, Pointer, Value, f16, f32, u16, u32
from ...ptx.types import Type, f16x2
from .packed_words import Words, f16_of

UNITS = 4
Pair = tuple[Value, Value]  # of rows g and g + 8


@dataclass(frozen=True)
class TilePlane:
    """A plane of the tile: `bytes` u8 (16, pitch).

    A plane whose rows do not all begin at words holds the aligned words that they lie in; `first`
    is then the number of pairs of bytes before the first row's in the whole plane, `stride` that of
    a row: those of odd numbers begin two bytes on.
    """

    k: Builder
    bytes: Pointer
    first: Value | None = None
    stride: int = 0

    def matrix(self, offset: Value | int) -> Words:
        """32 bytes from `offset` on of the 16 rows, as operand A of m16n8k32 holds them."""
        k = self.k
        return k.ldmatrix(self.bytes.at(k.lane_id % 16, k.lane_id // 16 * 16).at(offset))

    def rows(self) -> tuple[Pointer, Pointer]:
        """The lane's rows g and g + 8."""
        row = self.k.lane_id // 4
        low, high = self.bytes.at(row), self.bytes.at(row).at(8 * self.bytes.shape[1])
        if self.first is None:
            return low, high
        first = self.first + row * self.stride
        return low.at((first & 1) * 2), high.at(((first + 8 * self.stride) & 1) * 2)

    def f16_pairs(self, offset: Value) -> list[Pair]:
        """The two f16 at `offset` bytes of the lane's rows, as f32."""
        rows = [row.at(offset).cast(u32).load() for row in self.rows()]
        return [(f16_of(rows[0], i), f16_of(rows[1], i)) for i in range(2)]

    def f16(self) -> Pair:
        """The f16 of the lane's rows, of a plane of two bytes per row, as f32."""
        low, high = (row.cast(f16).load().to(f32) for row in self.rows())
        return low, high

    def byte_pairs(self, offset: Value) -> list[Pair]:
        """The two bytes at an even `offset` of the lane's rows."""
        rows = [row.at(offset).cast(u16).load().to(u32) for row in self.rows()]
        return [(rows[0] & 0xFF, rows[1] & 0xFF), (rows[0] >> 8, rows[1] >> 8)]


@dataclass(frozen=True)
class Int8Group:
    """Integers of 32 columns of a tile: weight = quant * scale, plus an offset in some formats.

    Attributes:
      index: which of the eight groups of 256 columns, u32.
      words: the quants, operand A of m16n8k32.
      type: u8 or s8.
      scales: f32, of all 32 columns, or of the first 16 and of the last; at most 21 significant
        bits.
      offsets: f32, or None: times the sum of a group's activations.
      minimums: where each 16 columns have a minimum of their own, these as operand A, each as often
        as its columns: `offsets` is then the factor of their product with the activations.
      wide: scales may reach 2^127, else they are below 2^104.
    """

    index: Value
    words: Words
    type: Type
    scales: Sequence[Pair]
    offsets: Pair | None = None
    minimums: Words | None = None
    wide: bool = False


@dataclass(frozen=True)
class F16Group:
    """32 columns of a tile as exact f16: (byte - bias) * scale, which a block's d multiplies.

    A byte becomes an f16 with no conversion, as the low bits of one whose exponent is `anchor`'s:
    1024 + byte, or 64 + byte / 16; an fma of two such takes the anchor and the bias away and
    scales.

    Attributes:
      index: which of the eight groups of 256 columns, u32.
      words: the bytes, as operand A of m16n8k32 has them.
      anchor: 0x64 or 0x54, the upper byte of the f16.
      steps: f16x2 (factor, addend) of rows g and g + 8, of all 32 columns or of the first 16 and of
        the last.
    """

    index: Value
    words: Words
    anchor: int
    steps: Sequence[tuple[Pair, Pair]]


@dataclass(frozen=True)
class BlockScales:
    """Factors of a tile's 256 columns: weight = scale * f16 + offset / 32 * its group's minimum.

    Attributes:
      scale, offset: f32, of rows g and g + 8; no offset: None.
      minimums: operand A of m16n8k16: those of group t, twice, then of group t + 4 (t = lane % 4);
        empty for none.
    """

    scale: Pair
    offset: Pair | None = None
    minimums: Words = ()


@dataclass(frozen=True)
class Minimums:
    """Integers that groups' sums of activations are multiplied by: 256 columns of a tile.

    Attributes:
      factor: f32, of all groups: what is added is factor * minimum * sum.
      words: operand A of m16n8k16, bf16: of rows g and g + 8 those of group t, twice, then of group
        t + 4 (t = lane % 4).
    """

    factor: Pair
    words: Words


class ReadMinimums(Protocol):
    """Reads the minimums of a tile's 256 columns."""

    def __call__(self, k: Builder, planes: Sequence[TilePlane]) -> Minimums: ...


class Int8Groups(Protocol):
    """Reads one unit (u32, below UNITS) of a tile, whose planes are the format's, as integers."""

    def __call__(
        self, k: Builder, planes: Sequence[TilePlane], unit: Value
    ) -> tuple[Int8Group, Int8Group]: ...


def block_pair(
    unit: Value,
    quants: Iterable[Words],
    type: Type,
    scales: Iterable[Pair],
    offsets: Iterable[Pair | None] = (None, None),
    *,
    wide: bool = False,
) -> tuple[Int8Group, Int8Group]:
    """Blocks 2 * unit and 2 * unit + 1 of a format whose blocks are groups.

    Each has quants of `type`, a scale for all of them, `wide` or not, and in some formats an
    offset.
    """
    low, high = (
        Int8Group(unit * 2 + i, words, type, [scale], offset, wide=wide)
        for i, (words, scale, offset) in enumerate(zip(quants, scales, offsets, strict=True))
    )
    return low, high


class F16Groups(Protocol):
    """Reads one unit of a tile as f16."""

    def __call__(
        self, k: Builder, planes: Sequence[TilePlane], unit: Value
    ) -> tuple[F16Group, F16Group]: ...


class ReadBlockScales(Protocol):
    """Reads what all units of a tile of f16 share."""

    def __call__(self, k: Builder, planes: Sequence[TilePlane]) -> BlockScales: ...


class F16Tile(NamedTuple):
    """The reader of a format whose weights are f16 but for a factor of 256 columns."""

    groups: F16Groups
    scales: ReadBlockScales


def twice(k: Builder, number: float) -> Value:
    """A number that f16 holds, twice in an f16x2."""
    return k.const(u32, int(np.float16(number).view(np.uint16)) * 0x10001).bits(f16x2)


def twice_bf16(k: Builder, number: Value) -> Value:
    """A u32 below 256 as bf16, twice in a u32."""
    bits = number.to(f32).bits(u32)
    return k.permute(bits, bits, 0x3232)


def byte_f16(k: Builder, word: Value, byte: int, bias: int = 0) -> Value:
    """A byte of the word, less a bias, twice in an f16x2."""
    anchored = k.permute(word, k.const(u32, 0x64646464), 0x4040 + 0x0101 * byte).bits(f16x2)
    return anchored - twice(k, 1024 + bias)


def step_of(k: Builder, scale: Value, factor: float, addend: float) -> Pair:
    """scale * factor, scale * addend: f16x2, both exact."""
    times = scale if factor == 1 else scale * twice(k, factor)
    return times, scale * twice(k, addend)


def scaled(pair: Pair, factor: float) -> Pair:
    return pair[0] * factor, pair[1] * factor
