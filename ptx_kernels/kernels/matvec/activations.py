"""Loads a mat-vec's activations from global or shared memory: int8 with scales, or floats.

A cursor is a lane's position in the activations. It advances along with the lane's packed row and
loads the activations of the row's runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...formats.unpack.packed_row import PackedRow
from ...ptx import Pointer, Value, f32, u32
from ..quantize_q8_1 import GROUP
from ..vectors import load_floats
from .reading_order import SPAN, SPAN_BYTES, ReadingOrder
from .rows import one_row


@dataclass(frozen=True)
class ActivationTile:
    """Activations, from one row, that a lane multiplies by its share of a quantization block.

    Attributes:
      runs: the values of each run, as u32 of four int8 or as f32.
      scales: for q8_1, the scale of each run's group of 32.
      sums: for q8_1, scale * sum of values, for each group that the runs lie in.
    """

    runs: Sequence[Sequence[Value]]
    scales: Sequence[Value] = ()
    sums: Sequence[Value] = ()


def _groups(row: PackedRow) -> list[int]:
    """Returns the groups of 32 that a lane's runs lie in, relative to the first group."""
    return sorted({offset // GROUP for offset, _ in row.runs})


def _tile(
    row: PackedRow, runs: Sequence[Sequence[Value]], pairs: Mapping[int, Sequence[Value]]
) -> ActivationTile:
    """Returns an `ActivationTile`; `pairs`: (scale, sum) of each group that the runs lie in."""
    scales = [pairs[offset // GROUP][0] for offset, _ in row.runs]
    return ActivationTile(runs, scales, [pairs[g][1] for g in _groups(row)])


class _QuantizedCursor:
    def __init__(
        self, values: Pointer, scale_sum: Pointer, row: PackedRow, block: Value, block_size: int
    ) -> None:
        self._row, self._block_size, self._columns = row, block_size, values.shape[1]
        self._groups = _groups(row)
        first = block * block_size + row.value_base
        self._values = values.at(0, first).cast(u32).moving()
        self._scale_sum = scale_sum.at(0, first // GROUP).moving()

    def load(self, j: int, block: int) -> ActivationTile:
        """Loads row j's activations for the quantization block `block` after the current one."""
        value = j * self._columns + block * self._block_size
        runs = [
            self._values.load_run((value + offset) // 4, length // 4)
            for offset, length in self._row.runs
        ]
        # two adjacent pairs, the first of an even group, are 16 aligned bytes
        step = 2 if 1 in self._groups else 1
        pairs: dict[int, Sequence[Value]] = {}
        for g in self._groups[::step]:
            numbers = self._scale_sum.load(2 * (value // GROUP + g), vector=2 * step)
            pairs[g], pairs[g + 1] = numbers[:2], numbers[2:]  # type: ignore[index]
        return _tile(self._row, runs, pairs)

    def advance(self, blocks: int) -> None:
        self._values.advance(blocks * self._block_size // 4)
        self._scale_sum.advance(blocks * 2 * self._block_size // GROUP)


class _OrderedCursor:
    """Cursor for `Ordered` activations: two base addresses from the lane's bits of an index.

    The offsets of the loads hold the bits of the lane's runs.
    """

    def __init__(
        self, rows: Pointer, order: ReadingOrder, row: PackedRow, block: Value, block_size: int
    ) -> None:
        self._row, self._order, self._block_size = row, order, block_size
        self._row_bytes, self._groups = rows.shape[1], _groups(row)
        first = block * block_size + row.value_base
        self._values = rows.at(0, order.value(first)).cast(u32).moving()
        self._pairs = rows.at(0, order.pair(first)).cast(f32).moving()

    def load(self, j: int, block: int) -> ActivationTile:
        """Loads row j's activations for the quantization block `block` after the current one."""
        base = j * self._row_bytes + self._spans(block)
        runs = [
            [
                value
                for position, length in self._order.chunks(offset, count)
                for value in self._values.load_run((base + position) // 4, length // 4)
            ]
            for offset, count in self._row.runs
        ]
        step = 2 if 1 in self._groups else 1
        pairs: dict[int, Sequence[Value]] = {}
        for g in self._groups[::step]:
            position = base + self._order.pair(g * GROUP) - self._order.pair(0)
            numbers = self._pairs.load(position // 4, vector=2 * step)
            pairs[g], pairs[g + 1] = numbers[:2], numbers[2:]  # type: ignore[index]
        return _tile(self._row, runs, pairs)

    def advance(self, blocks: int) -> None:
        self._values.advance(self._spans(blocks) // 4)
        self._pairs.advance(self._spans(blocks) // 4)

    def _spans(self, blocks: int) -> int:
        """Returns the size in bytes of quantization blocks, which must fill spans of 256 values."""
        spans, rest = divmod(blocks * self._block_size, SPAN)
        assert not rest, blocks
        return spans * SPAN_BYTES


class _FloatCursor:
    def __init__(self, x: Pointer, row: PackedRow, block: Value, block_size: int) -> None:
        self._row, self._block_size, self._columns = row, block_size, x.shape[1]
        self._x = x.at(0, block * block_size + row.value_base).moving()

    def load(self, j: int, block: int) -> ActivationTile:
        value = j * self._columns + block * self._block_size
        return ActivationTile(
            [load_floats(self._x.at(value + offset), length) for offset, length in self._row.runs]
        )

    def advance(self, blocks: int) -> None:
        self._x.advance(blocks * self._block_size)


@dataclass(frozen=True)
class Quantized:
    """q8_1 activations in global memory: s8 (m, columns) and scale_sum f32 (m, columns / 32, 2)."""

    values: Pointer
    scale_sum: Pointer

    def cursor(self, row: PackedRow, block: Value, block_size: int) -> _QuantizedCursor:
        """Returns a cursor at quantization block `block`, with the runs of a lane's packed row."""
        return _QuantizedCursor(self.values, self.scale_sum, row, block, block_size)

    def row(self, row: Value) -> Quantized:
        """Returns only row `row` (u32), as (1, columns)."""
        return Quantized(one_row(self.values, row), one_row(self.scale_sum, row))


@dataclass(frozen=True)
class Ordered:
    """q8_1 activations in shared memory, s8 (m, bytes per row), laid out by a `ReadingOrder`."""

    rows: Pointer
    order: ReadingOrder

    def cursor(self, row: PackedRow, block: Value, block_size: int) -> _OrderedCursor:
        return _OrderedCursor(self.rows, self.order, row, block, block_size)


@dataclass(frozen=True)
class Floats:
    """Float activations (m, columns), loaded as f32, in global or shared memory."""

    x: Pointer

    def cursor(self, row: PackedRow, block: Value, block_size: int) -> _FloatCursor:
        return _FloatCursor(self.x, row, block, block_size)

    def row(self, row: Value) -> Floats:
        """Returns only row `row` (u32), as (1, columns)."""
        return Floats(one_row(self.x, row))


Activations = Quantized | Ordered | Floats
