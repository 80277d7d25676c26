"""Interface for reading packed rows in GEMM kernels: a warp's tile of 16 rows, 256 columns.

A tile, in shared memory, has four units of two groups of 32 columns each; the groups of a unit
share bytes. `ldmatrix` loads packed bytes in the order in which mma takes quants: four columns of
rows g and g + 8 per lane (g = lane / 4). Quants are therefore unpacked in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ...ptx import Builder, Pointer, Value, bf16, f16, f32, u16, u32
from ...ptx.types import Type, f16x2
from .packed_words import Words, f16_of

UNITS = 4
Pair = tuple[Value, Value]  # for rows g and g + 8


@dataclass(frozen=True)
class TilePlane:
    """One plane of a tile in shared memory: `bytes` u8 (16, pitch).

    If the rows of a plane do not all begin at word boundaries, `bytes` holds the aligned words that
    contain them. `first` is then the number of byte pairs before the tile's first row in the full
    plane, and `stride` the byte pairs of a row. Rows that begin at an odd byte pair begin two bytes
    later.
    """

    k: Builder
    bytes: Pointer
    first: Value | None = None
    stride: int = 0

    def matrix(self, offset: Value | int) -> Words:
        """Loads 32 bytes of each row, from `offset` on, as operand A of m16n8k32."""
        k = self.k
        return k.ldmatrix(self.bytes.at(k.lane_id % 16, k.lane_id // 16 * 16).at(offset))

    def rows(self) -> tuple[Pointer, Pointer]:
        """Returns the addresses of the lane's rows g and g + 8."""
        row = self.k.lane_id // 4
        low, high = self.bytes.at(row), self.bytes.at(row).at(8 * self.bytes.shape[1])
        if self.first is None:
            return low, high
        first = self.first + row * self.stride
        return low.at((first & 1) * 2), high.at(((first + 8 * self.stride) & 1) * 2)

    def f16_pairs(self, offset: Value) -> list[Pair]:
        """Loads the two f16 at byte `offset` of the lane's rows g and g + 8, as f32."""
        rows = [row.at(offset).cast(u32).load() for row in self.rows()]
        return [(f16_of(rows[0], i), f16_of(rows[1], i)) for i in range(2)]

    def f16(self) -> Pair:
        """Loads the f16 of the lane's rows from a plane of two bytes per row, as f32."""
        low, high = (row.cast(f16).load().to(f32) for row in self.rows())
        return low, high

    def byte_pairs(self, offset: Value) -> list[Pair]:
        """Loads the two bytes at an even `offset` of the lane's rows."""
        rows = [row.at(offset).cast(u16).load().to(u32) for row in self.rows()]
        return [(rows[0] & 0xFF, rows[1] & 0xFF), (rows[0] >> 8, rows[1] >> 8)]


@dataclass(frozen=True)
class Int8Group:
    """8-bit quants of 32 columns of a tile: weight = quant * scale, plus an offset in some formats.

    Attributes:
      index: which of the tile's eight groups of 32 columns, u32.
      words: the quants, operand A of m16n8k32.
      type: u8 or s8.
      scales: f32, one for all 32 columns, or one for the first 16 and one for the last; at most 21
        significant bits.
      offsets: f32, multiplied by the sum of a group's activations; None if absent.
      minimums: for formats with a minimum per 16 columns: the minimums as operand A, each repeated
        for its columns. `offsets` is then the factor of their product with the activations.
      wide: whether scales may reach 2^127; else they are below 2^104.
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
    """32 columns of a tile as exact f16: (byte - bias) * scale, to be multiplied by a block's d.

    A byte becomes an f16 without a conversion: it is the low bits of an f16 with the exponent of
    `anchor`, which is 1024 + byte, or 64 + byte / 16. An fma on pairs subtracts the anchor and the
    bias, and scales.

    Attributes:
      index: which of the tile's eight groups of 32 columns, u32.
      words: the bytes, as operand A of m16n8k32.
      anchor: 0x64 or 0x54, the upper byte of the f16.
      steps: f16x2 (factor, addend) of rows g and g + 8, one for all 32 columns, or one for the
        first 16 and one for the last.
    """

    index: Value
    words: Words
    anchor: int
    steps: Sequence[tuple[Pair, Pair]]


@dataclass(frozen=True)
class BlockScales:
    """Factors of a tile's 256 columns: weight = scale * f16 + offset / 32 * minimum of its group.

    Attributes:
      scale, offset: f32, for rows g and g + 8; offset is None for formats without one.
      minimums: operand A of m16n8k16: the minimum of group t, twice, then of group t + 4 (t = lane
        % 4); empty for formats without minimums.
    """

    scale: Pair
    offset: Pair | None = None
    minimums: Words = ()


@dataclass(frozen=True)
class Minimums:
    """Integer minimums of a tile's 256 columns, to be multiplied by groups' sums of activations.

    Attributes:
      factor: f32, for all groups; factor * minimum * sum is added.
      words: operand A of m16n8k16, of `minimum_type`: for rows g and g + 8, the minimum of group t,
        twice, then of group t + 4 (t = lane % 4).
    """

    factor: Pair
    words: Words


def minimum_type(k: Builder) -> Type:
    """Returns the type of `Minimums.words`: bf16 where `mma` takes it, else f16."""
    return bf16 if k.multiplies(bf16) else f16


class ReadMinimums(Protocol):
    """Emits the reads of the minimums of a tile's 256 columns."""

    def __call__(self, k: Builder, planes: Sequence[TilePlane]) -> Minimums: ...


class Int8Groups(Protocol):
    """Emits the unpacking of one unit of a tile to 8 bits; returns its two groups of 32 columns.

    `planes` are the format's planes; `unit` (u32) is the unit's index, below UNITS.
    """

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
    """Returns the groups of quantization blocks 2 * unit and 2 * unit + 1, of 32 weights each.

    Each group has quants of `type`, one scale, `wide` or not, and in some formats an offset.
    """
    low, high = (
        Int8Group(unit * 2 + i, words, type, [scale], offset, wide=wide)
        for i, (words, scale, offset) in enumerate(zip(quants, scales, offsets, strict=True))
    )
    return low, high


class F16Groups(Protocol):
    """Emits the unpacking of one unit of a tile to f16; returns its two groups of 32 columns."""

    def __call__(
        self, k: Builder, planes: Sequence[TilePlane], unit: Value
    ) -> tuple[F16Group, F16Group]: ...


class ReadBlockScales(Protocol):
    """Emits the reads of the factors that all units of an f16 tile share."""

    def __call__(self, k: Builder, planes: Sequence[TilePlane]) -> BlockScales: ...


class F16Tile(NamedTuple):
    """Readers of a tile for formats whose weights are f16 with a factor per 256 columns."""

    groups: F16Groups
    scales: ReadBlockScales


def twice(k: Builder, number: float) -> Value:
    """Emits an f16x2 constant with the same number, exact in f16, in both halves."""
    return k.const(u32, int(np.float16(number).view(np.uint16)) * 0x10001).bits(f16x2)


def twice_minimum(k: Builder, number: Value) -> Value:
    """Emits the conversion of a u32 below 256 to `minimum_type`, in both halves of a u32."""
    if minimum_type(k) is f16:
        return byte_f16(k, number, 0).bits(u32)
    bits = number.to(f32).bits(u32)
    return k.permute(bits, bits, 0x3232)


def byte_f16(k: Builder, word: Value, byte: int, bias: int = 0) -> Value:
    """Emits an f16x2 with byte `byte` of a word minus a bias, the same in both halves."""
    anchored = k.permute(word, k.const(u32, 0x64646464), 0x4040 + 0x0101 * byte).bits(f16x2)
    return anchored - twice(k, 1024 + bias)


def step_of(k: Builder, scale: Value, factor: float, addend: float) -> Pair:
    """Emits (scale * factor, scale * addend) as f16x2, both exact."""
    times = scale if factor == 1 else scale * twice(k, factor)
    return times, scale * twice(k, addend)


def scaled(pair: Pair, factor: float) -> Pair:
    return pair[0] * factor, pair[1] * factor
