"""Fragments: the operands of mma in registers, and where the accumulators of a lane lie."""

from __future__ import annotations

from ...formats.unpack.packed_tile import F16Group
from ...formats.unpack.packed_words import Words
from ...ptx import Builder, Pointer, Value, Var, f32, u32
from ...ptx.types import f16x2
from ..quantize_q8_1 import GROUP

TILE_ROWS, TILE_COLUMNS = 16, 8  # of an mma's result: weight rows, activations

#: A warp's sums for 16 weight rows: [8 activations][4, as mma's C has them].
TileSums = list[list[Var]]
Accumulators = list[TileSums]


def accumulators(k: Builder, tiles: int, rows: int) -> Accumulators:
    """Zeros for `tiles` tiles of weight rows and `rows` rows of activations."""
    return [
        [[k.var(f32, 0.0) for _ in range(4)] for _ in range(rows // TILE_COLUMNS)]
        for _ in range(tiles)
    ]


def place(k: Builder, row: Value, column: Value, j: int) -> tuple[Value, Value]:
    """Weight row and activation of a lane's accumulator j, in the 16 x 8 from (row, column) on."""
    return row + k.lane_id // 4 + 8 * (j // 2), column + k.lane_id % 4 * 2 + j % 2


def f16_weights(k: Builder, group: F16Group) -> list[Words]:
    """Operand A of m16n8k16 of the group's first 16 columns and of its last.

    Bytes (0, 1) and (2, 3) of a lane make the two words of a row: the activations of every 16
    columns have their pairs in even places first, then those in odd ones.
    """
    anchor = k.const(u32, group.anchor * 0x01010101)
    found: list[Words] = []
    for i, rows in enumerate(group.steps if len(group.steps) == 2 else [*group.steps] * 2):
        pairs = [
            (group.words[2 * i + r], which, rows[r]) for which in (0x4140, 0x4342) for r in range(2)
        ]
        anchored = [
            (k.permute(word, anchor, which).bits(f16x2), step) for word, which, step in pairs
        ]
        found.append([k.fma(value, *step).bits(u32) for value, step in anchored])
    return found


def f16_activations(k: Builder, values: Pointer, group: Value) -> Pointer:
    """The lane's place for `ldmatrix` of a group of f16 of 8 activations: B of two mma's."""
    return values.at(k.lane_id % 8, k.lane_id // 8 * 16).at(group * (2 * GROUP))


def two_activations(k: Builder, rows: Pointer) -> Pointer:
    """The lane's place for `ldmatrix` of 32 bytes of 16 activations: operand B of two mma's."""
    return rows.at(k.lane_id % 8 + k.lane_id // 16 * 8, k.lane_id // 8 % 2 * 16)


def matrices_of(k: Builder, fragments: Pointer, left: int) -> Words:
    """B of 8 activations at `two_activations`, and where `left` tiles are several of the next."""
    return k.ldmatrix(fragments, 4 if left > 1 else 2)
