"""Packed rows as operand A of an integer mma: what the block formats' tensor-core readers share.

A tile is 16 rows of 256 columns in shared memory. It splits into four units of two groups of 32 columns each, those
that share bytes. `ldmatrix` hands out packed bytes just as mma wants the quants in them, four columns of rows g and
g + 8 a lane (g = lane / 4), so that quants are unpacked where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..ptx import Builder, Pointer, Value, u32
from ..ptx.types import Type
from .unpack import Words, half

UNITS = 4
Pair = tuple[Value, Value]  # of rows g and g + 8


@dataclass(frozen=True)
class Group:
    """32 columns of a tile: its weights are quants * scale, plus an offset where the format has one.

    Attributes:
      index: which of the eight groups of 256 columns, u32.
      words: the quants, operand A of m16n8k32.
      type: u8 or s8.
      scales: f32, of all 32 columns, or of the first 16 and of the last; at most 21 significant bits.
      offsets: f32, or None.
    """

    index: Value
    words: Words
    type: Type
    scales: Sequence[Pair]
    offsets: Pair | None = None


class Fragments(Protocol):
    """Reads one unit of a tile: `planes` are the format's, u8 (16 rows, pitch) in shared memory.

    A plane of less than 4 bytes per block and row holds the aligned 4 bytes that the block's lie in: those of row r
    at an odd number of blocks from the matrix's start, `start` (u32) + r * blocks, are the upper ones.
    """

    def __call__(
        self, k: Builder, planes: Sequence[Pointer], unit: Value, start: Value, blocks: int
    ) -> tuple[Group, Group]: ...


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


def scaled(pair: Pair, factor: float) -> Pair:
    return pair[0] * factor, pair[1] * factor
