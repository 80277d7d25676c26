"""Packed rows as operand A of an integer mma: what the block formats' tensor-core readers share.

A tile is 16 rows of 256 columns in shared memory. It splits into four units of two groups of 32
columns each, those that share bytes. `ldmatrix` hands out packed bytes just as mma wants the quants
in them, four columns of rows g and g + 8 a lane (g = lane / 4), so that quants are unpacked where
they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..ptx import Builder, Pointer, Value, u32
from ..ptx.types import Type, f16x2
from .words import Words, half

UNITS = 4
Pair = tuple[Value, Value]  # of rows g and g + 8


@dataclass(frozen=True)
class Group:
    """32 columns of a tile: its weights are quants * scale, plus an offset where the format has
    one.

    Attributes:
      index: which of the eight groups of 256 columns, u32.
      words: the quants, operand A of m16n8k32.
      type: u8 or s8.
      scales: f32, of all 32 columns, or of the first 16 and of the last; at most 21 significant
        bits.
      offsets: f32, or None.
    """

    index: Value
    words: Words
    type: Type
    scales: Sequence[Pair]
    offsets: Pair | None = None


@dataclass(frozen=True)
class Halves:
    """32 columns of a tile as exact f16: the numbers (byte - bias) * scale that a block's d
    multiplies.

    A byte becomes an f16 with no conversion, as the low bits of one whose exponent is `anchor`'s:
    1024 + byte, or 64 + byte / 16; an fma of two such takes the anchor and the bias away and
    scales. Bytes (0, 1) and (2, 3) of a lane make the two words of a row that an mma of 16 columns
    takes: its activations have their pairs in even places first, then those in odd ones.

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

    def operands(self, k: Builder) -> list[Words]:
        """Operand A of m16n8k16 of the first 16 columns and of the last."""
        anchor = k.const(u32, self.anchor * 0x01010101)
        found: list[Words] = []
        for i, rows in enumerate(self.steps if len(self.steps) == 2 else [*self.steps] * 2):
            pairs = [
                (self.words[2 * i + r], which, rows[r])
                for which in (0x4140, 0x4342)
                for r in range(2)
            ]
            raised = [
                (k.permute(word, anchor, which).bits(f16x2), step) for word, which, step in pairs
            ]
            found.append([k.fma(value, *step).bits(u32) for value, step in raised])
        return found


@dataclass(frozen=True)
class Block:
    """What 256 columns of a tile share: weights are scale * halves + offset / 32 * the minimum of
    their group.

    Attributes:
      scale, offset: f32, of rows g and g + 8; no offset: None.
      minimums: operand A of m16n8k16: those of group t, twice, then of group t + 4 (t = lane % 4);
        empty for none.
    """

    scale: Pair
    offset: Pair | None = None
    minimums: Words = ()


class Fragments(Protocol):
    """Reads one unit of a tile: `planes` are the format's, u8 (16 rows, pitch) in shared memory.

    A plane of less than 4 bytes per block and row holds the aligned 4 bytes that the block's lie
    in: those of row r at an odd number of blocks from the matrix's start, `start` (u32) + r *
    blocks, are the upper ones.
    """

    def __call__(
        self, k: Builder, planes: Sequence[Pointer], unit: Value, start: Value, blocks: int
    ) -> tuple[Group, Group]: ...


class HalfFragments(Protocol):
    """As Fragments, for f16; `block_of` in the same files reads what all units of a tile share."""

    def __call__(
        self, k: Builder, planes: Sequence[Pointer], unit: Value
    ) -> tuple[Halves, Halves]: ...


class HalfBlock(Protocol):
    def __call__(
        self, k: Builder, planes: Sequence[Pointer], start: Value, blocks: int
    ) -> Block: ...


def matrix(k: Builder, plane: Pointer, offset: Value | int) -> Words:
    """32 bytes from `offset` on of the 16 rows, as operand A of m16n8k32 holds them."""
    return k.ldmatrix(plane.at(k.lane_id % 16, k.lane_id // 16 * 16).at(offset))


def row_pair(k: Builder, plane: Pointer) -> tuple[Pointer, Pointer]:
    """The lane's rows g and g + 8."""
    return plane.at(k.lane_id // 4), plane.at(k.lane_id // 4).at(8 * plane.shape[1])


def half_pairs(k: Builder, plane: Pointer, offset: Value) -> list[Pair]:
    """The two f16 at `offset` bytes of the lane's rows, as f32."""
    rows = [row.at(offset).cast(u32).load() for row in row_pair(k, plane)]
    return [(half(rows[0], i), half(rows[1], i)) for i in range(2)]


def twice(k: Builder, number: float) -> Value:
    """A number that f16 holds, in both halves of an f16x2."""
    return k.const(u32, int(np.float16(number).view(np.uint16)) * 0x10001).bits(f16x2)


def byte_halves(k: Builder, word: Value, byte: int, bias: int = 0) -> Value:
    """A byte of the word, less a bias, in both halves of an f16x2."""
    raised = k.permute(word, k.const(u32, 0x64646464), 0x4040 + 0x0101 * byte).bits(f16x2)
    return raised - twice(k, 1024 + bias)


def step_of(k: Builder, scale: Value, factor: float, addend: float) -> Pair:
    """scale * factor, scale * addend: f16x2, both exact."""
    times = scale if factor == 1 else scale * twice(k, factor)
    return times, scale * twice(k, addend)


def scaled(pair: Pair, factor: float) -> Pair:
    return pair[0] * factor, pair[1] * factor
