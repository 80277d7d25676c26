"""The activations of a mat-vec, in global or shared memory: int8 with scales, or floats."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...formats.dot import ActivationTile, PackedRow, Tile, dot_f32, dot_q8_1, load_words
from ...ptx import Builder, Pointer, Value, Var, u32
from ..quantize_q8_1 import GROUP
from ..vectors import load_floats


class Cursor(Protocol):
    """Where a lane stands in the activations: it moves along with its packed row."""

    def load(self, j: int, block: int) -> ActivationTile:
        """Row j's activations for the block that is `block` blocks ahead."""

    def advance(self, blocks: int) -> None: ...


class Activations(Protocol):
    floats: bool

    def cursor(self, row: PackedRow, block: Value, block_size: int) -> Cursor:
        """Stands at block `block` of the activations, as the packed row does."""

    def dot(self, k: Builder, tile: Tile, x: ActivationTile, total: Var) -> None: ...


class Quantized:
    """q8_1: values s8 (m, columns), scale_sum f32 (m, columns / 32, 2)."""

    floats = False
    dot = staticmethod(dot_q8_1)

    def __init__(self, values: Pointer, scale_sum: Pointer) -> None:
        self._values, self._scale_sum = values, scale_sum

    def cursor(self, row: PackedRow, block: Value, block_size: int) -> Cursor:
        return _QuantizedCursor(self._values, self._scale_sum, row, block, block_size)


@dataclass
class _QuantizedTile:
    runs: Sequence[Sequence[Value]]
    scales: Sequence[Value]
    group_sums: Sequence[Value]
    row: PackedRow

    @functools.cached_property
    def sums(self) -> Sequence[Value]:
        """Selected where they are first used, which keeps them in registers for less long."""
        return self.row.minimum_sums(self.group_sums)


class _QuantizedCursor:
    def __init__(self, values: Pointer, scale_sum: Pointer, row: PackedRow, block: Value, block_size: int) -> None:
        self._row, self._block_size, self._columns = row, block_size, values.shape[1]
        self._groups = sorted({offset // GROUP for offset, _ in row.runs})
        first = block * block_size + row.value_base
        self._values = values.at(0, first).cast(u32).moving()
        self._scale_sum = scale_sum.at(0, first // GROUP).moving()

    def load(self, j: int, block: int) -> _QuantizedTile:
        value = j * self._columns + block * self._block_size
        runs = [load_words(self._values, (value + offset) // 4, length // 4) for offset, length in self._row.runs]
        pairs = self._pairs(value // GROUP)
        scales = [pairs[offset // GROUP][0] for offset, _ in self._row.runs]
        return _QuantizedTile(runs, scales, [pairs[g][1] for g in self._groups], self._row)

    def _pairs(self, group: int) -> dict[int, tuple[Value, ...]]:
        """(scale, scaled sum) of each group; neighbours, whose number is even, in one load of 16 bytes."""
        pairs: dict[int, tuple[Value, ...]] = {}
        for g in self._groups:
            if g in pairs:
                continue
            if len(self._groups) > 1 and g + 1 in self._groups:
                four = self._scale_sum.load(2 * (group + g), vector=4)
                pairs[g], pairs[g + 1] = four[:2], four[2:]
            else:
                pairs[g] = self._scale_sum.load(2 * (group + g), vector=2)
        return pairs

    def advance(self, blocks: int) -> None:
        self._values.advance(blocks * self._block_size // 4)
        self._scale_sum.advance(blocks * 2 * self._block_size // GROUP)


class Floats:
    """f32 (m, columns)."""

    floats = True
    dot = staticmethod(dot_f32)

    def __init__(self, x: Pointer) -> None:
        self._x = x

    def cursor(self, row: PackedRow, block: Value, block_size: int) -> Cursor:
        return _FloatCursor(self._x, row, block, block_size)


class _FloatTile:
    scales: Sequence[Value] = ()

    def __init__(self, runs: Sequence[Sequence[Value]]) -> None:
        self.runs = runs

    @functools.cached_property
    def sums(self) -> Sequence[Value]:
        """Of each run, found once for all rows of weights."""
        return [functools.reduce(lambda a, b: a + b, run) for run in self.runs]


class _FloatCursor:
    def __init__(self, x: Pointer, row: PackedRow, block: Value, block_size: int) -> None:
        self._row, self._block_size, self._columns = row, block_size, x.shape[1]
        self._x = x.at(0, block * block_size + row.value_base).moving()

    def load(self, j: int, block: int) -> _FloatTile:
        value = j * self._columns + block * self._block_size
        return _FloatTile([load_floats(self._x.at(value + offset), length) for offset, length in self._row.runs])

    def advance(self, blocks: int) -> None:
        self._x.advance(blocks * self._block_size)
