"""Fragments (mma operands in registers) of weights and activations; accumulator positions."""

from __future__ import annotations

from ...formats.unpack.packed_tile import F16Group
from ...formats.unpack.packed_words import Words
from ...ptx import Builder, Pointer, Value, Var, f32, u32
from ...ptx.types import f16x2
from ..quantize_q8_1 import GROUP

TILE_ROWS, TILE_COLUMNS = 16, 8  # of an mma's result: weight rows, activations

#: Sums of a warp for 16 weight rows: [8 activations][4, in the order of mma's C].
TileSums = list[list[Var]]
Accumulators = list[TileSums]


def accumulators(k: Builder, tiles: int, rows: int) -> Accumulators:
    """Returns zeroed mma accumulators for `tiles` tiles of weight rows and `rows` activations."""
    return [
        [[k.var(f32, 0.0) for _ in range(4)] for _ in range(rows // TILE_COLUMNS)]
        for _ in range(tiles)
    ]


def accumulator_index(k: Builder, row: Value, column: Value, j: int) -> tuple[Value, Value]:
    """Returns (weight row, activation row) of accumulator j of the tile at (row, column)."""
    return row + k.lane_id // 4 + 8 * (j // 2), column + k.lane_id % 4 * 2 + j % 2


def f16_weights(k: Builder, group: F16Group) -> list[Words]:
    """Emits operands A of m16n8k16 for the group's first 16 columns and for its last 16.

    Bytes (0, 1) and (2, 3) of a lane form the two words of a row. The activations of every 16
    columns must therefore have their pairs at even positions first, then those at odd ones.
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
    """Returns the lane's `ldmatrix` address for 8 activations and group `group` of 32 columns, f16.

    `ldmatrix` then loads operand B of two mma.
    """
    return values.at(k.lane_id % 8, k.lane_id // 8 * 16).at(group * (2 * GROUP))


def two_activations(k: Builder, rows: Pointer) -> Pointer:
    """Returns the lane's `ldmatrix` address for 16 activations of 32 bytes each.

    `ldmatrix` then loads operand B of two mma, for 8 activations each.
    """
    return rows.at(k.lane_id % 8 + k.lane_id // 16 * 8, k.lane_id // 8 % 2 * 16)


def matrices_of(k: Builder, fragments: Pointer, left: int) -> Words:
    """Loads operand B of 8 activations, and of the next 8 if `left` (tiles left) is more than 1.

    `fragments`: an address from `two_activations`.
    """
    return k.ldmatrix(fragments, 4 if left > 1 else 2)
