"""Online softmax for 16 query rows in mma accumulators (FlashAttention-2, Dao 2023)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...ptx import Builder, Pointer, Value, Var, bf16, f16, f32, u32
from ...ptx.types import Type
from ..gemm.fragments import TILE_COLUMNS
from .bf16_parts import split
from .online_softmax import LOWEST

DEPTH = 16  # bf16 elements in an mma's sum; also rows or columns of an `ldmatrix` tile
QUAD = 4  # lanes that share a row
#: Weights up to 2^HEADROOM fit f16 as well: small ones keep more bits above f16's minimum, 2^-24.
HEADROOM = 14
_TWO_ONES = {bf16: 0x3F803F80, f16: 0x3C003C00}  # 1.0, twice
T = TypeVar("T")
#: Words of one register per lane: [parts], each the registers of an mma operand.
Parts = Sequence[Sequence[Value]]
#: Sums of 16 rows and 8 columns, see `Builder.mma`: two of the lane's first row, two of its second.
Sums = Sequence[Value]


@dataclass(frozen=True)
class Tiles:
    """bf16 matrices in shared memory, parts stacked, as the source of `ldmatrix`.

    `address` is the lane's `ldmatrix` address. A part has `rows` rows, `pitch` bytes apart.
    """

    address: Pointer
    rows: int
    pitch: int
    parts: int

    def load(self, k: Builder, row: int, column: int, *, transpose: bool = False) -> Parts:
        """Loads the 16 x 16 tile in tile row `row` and tile column `column` of each part."""
        at = row * DEPTH * self.pitch + column * DEPTH * bf16.size
        addresses = [
            self.address.at(part * self.rows * self.pitch + at) for part in range(self.parts)
        ]
        return [k.ldmatrix(address, transpose=transpose) for address in addresses]


def multiply(
    k: Builder,
    total: Sums,
    a: Parts,
    b: Parts,
    counted: Sequence[tuple[int, int]],
    type: Type = bf16,
) -> Sums:
    """Returns total + a b; `counted`: the pairs of parts that are multiplied."""
    for i, j in counted:
        total = k.mma(a[i], b[j], total, type)
    return total


def _exp2(k: Builder, x: Value) -> Value:
    """Emits 2 to the power of x; 0 below 2^-126, which avoids scaling for subnormal results."""
    return k.instruction("ex2.approx.ftz.f32", x)


class TensorSoftmax:
    """Running softmax of a warp's 16 query rows, two per lane: FlashAttention's m, l and o.

    A lane has a share of two rows. m is the highest score so far, l the sum of 2^(score - m), o the
    sum of values with these weights. l is computed like a column of ones in o.
    """

    def __init__(
        self,
        k: Builder,
        value_dim: int,
        sinks: Sequence[Value] | None = None,
        type: Type = bf16,
    ) -> None:
        """Initializes m, l and o.

        Args:
          sinks: logits in base 2 of the lane's two rows, without values; None if absent.
          type: of values and of the weights' parts.
        """
        self._k, self._type = k, type
        self._m = [k.var(f32, LOWEST) for _ in range(2)]
        self._l = [k.var(f32, 0.0 if sinks is None else 1.0) for _ in range(4)]
        self._o = [[k.var(f32, 0.0) for _ in range(4)] for _ in range(value_dim // TILE_COLUMNS)]
        self._ones = [k.const(u32, _TWO_ONES[type])] * 2
        for m, logit in zip(self._m, sinks or (), strict=False):
            m.set(k.maximum(logit, LOWEST))  # minus infinity has no effect

    def weights(self, scores: Sequence[Sums]) -> list[Sums]:
        """Updates m and rescales l and o; returns 2^(score - m) of some tokens' scores.

        A score of minus infinity, for a masked token, gives 0.
        """
        k, rows = self._k, []
        for i, m in enumerate(self._m):
            mine = [x for tile in scores for x in _of_row(tile, i)]
            top = k.warp_max(functools.reduce(k.maximum, mine), lanes=QUAD)
            highest = k.maximum(m, top if self._type is bf16 else top - HEADROOM)
            factor = _exp2(k, m - highest)
            m.set(highest)
            for tile in (self._l, *self._o):
                for total in _of_row(tile, i):
                    total *= factor
            rows.append([_exp2(k, x - highest) for x in mine])
        return [[*rows[0][n : n + 2], *rows[1][n : n + 2]] for n in range(0, len(rows[0]), 2)]

    def add(
        self,
        weights: Sequence[Sums],
        values: Tiles,
        parts: int,
        counted: Sequence[tuple[int, int]],
    ) -> None:
        """Adds weights . values to o, and the weights to l.

        `parts`: of the weights; `counted`: the pairs of parts that are multiplied.
        """
        k = self._k
        for depth in range(len(weights) // 2):
            # operand A has the same layout as accumulators
            pairs = [
                _of_row(tile, i) for tile in weights[2 * depth : 2 * depth + 2] for i in (0, 1)
            ]
            a = list(zip(*(split(k, pair, parts, self._type) for pair in pairs), strict=True))
            ones = multiply(k, self._l, a, [self._ones], [(i, 0) for i in range(parts)], self._type)
            _set(self._l, ones)
            for column in range(len(self._o) // 2):
                b = values.load(k, depth, column, transpose=True)
                for half, tile in enumerate(self._o[2 * column : 2 * column + 2]):
                    two = [part[2 * half : 2 * half + 2] for part in b]
                    _set(tile, multiply(k, tile, a, two, counted, self._type))

    def normalized(self) -> list[list[tuple[Value, ...]]]:
        """Returns o / l of the lane's two rows, as pairs 8 dimensions apart.

        It is zeros if no token was seen.
        """
        k = self._k
        rows: list[list[tuple[Value, ...]]] = []
        for i in range(2):
            total = self._l[2 * i]
            scale = k.select(total == 0.0, k.const(f32, 0.0), k.const(f32, 1.0) / total)
            rows.append([tuple(x * scale for x in _of_row(tile, i)) for tile in self._o])
        return rows

    def shares(self) -> list[tuple[Value, Value, list[tuple[Value, ...]]]]:
        """Returns (m, l, o) of the lane's two rows, unnormalized, for a later merge of splits.

        o is in pairs 8 dimensions apart.
        """
        return [
            (self._m[i], self._l[2 * i], [tuple(_of_row(tile, i)) for tile in self._o])
            for i in range(2)
        ]


def _of_row(tile: Sequence[T], row: int) -> Sequence[T]:
    """Returns the lane's two accumulators of its first (row 0) or second row (row 1)."""
    return tile[2 * row : 2 * row + 2]


def _set(totals: Sequence[Var], sums: Sums) -> None:
    for total, value in zip(totals, sums, strict=True):
        total.set(value)
