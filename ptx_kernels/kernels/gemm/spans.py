"""Spans: the ranges of weight rows, activation rows and columns that a thread block computes."""

from __future__ import annotations

from dataclasses import dataclass

from ...ptx import Builder, Value, s32, u32


class Span:
    """Range of `size` rows, of `total`, that a thread block computes, from row `start` on.

    The last span may overlap the one before it; a single span may be truncated.
    """

    def __init__(self, k: Builder, number: Value, total: int, size: int) -> None:
        self._total, self._first, self.size = total, number * size, size
        self.start = self._first if total <= size else k.minimum(self._first, total - size)

    def owns(self, row: Value) -> Value | None:
        """Returns whether this span owns a row, rather than the span before; None means yes."""
        if self._total % self.size == 0:
            return None
        return row < self._total if self._total < self.size else row >= self._first


@dataclass(frozen=True)
class StepSpan:
    """Pipeline steps of a thread block along the columns.

    Attributes:
      first: the thread block's first step, u32; 0 for thread blocks that do not share columns.
      total: steps of all thread blocks that share the columns; the last ones may be past the end.
    """

    first: Value | int = 0
    total: int = 0

    def after(self, address: Value, nbytes: int) -> Value:
        """Returns `address` plus the bytes of all steps before the first, `nbytes` per step."""
        return address if isinstance(self.first, int) else address + self.first * nbytes

    def rest(self, row_bytes: int, nbytes: int) -> Value | int:
        """Returns the bytes from the first step (of `nbytes`) to the end of a row, s32.

        It is negative if the first step is past the end.
        """
        if isinstance(self.first, int):
            return row_bytes
        return self.first.bits(s32) * -nbytes + row_bytes


ALL = StepSpan()  # from the first step on, none past the end


class ExpertTile:
    """Range of `size` activation rows, of `total`, of which only one expert's rows count.

    `expert` (u32) may be out of range. Rows `first` to below `end` belong to the tile; the range
    begins at `start`.
    """

    def __init__(self, k: Builder, number: Value, count: int, total: int, size: int) -> None:
        tile = k.input("tiles", s32, (count, 3)).at(number)
        self.expert, self.first, self.end = (tile.load(i).bits(u32) for i in range(3))
        self.size = size
        self.start = k.const(u32, 0) if total <= size else k.minimum(self.first, total - size)

    def owns(self, row: Value) -> Value:
        """Returns whether a row belongs to the tile."""
        return (row >= self.first) & (row < self.end)


def tile_count(m: int, experts: int, m_tile: int) -> int:
    """Returns the number of tiles of m_tile rows for m rows; with experts, one more per expert.

    With experts the m rows are sorted by expert. Rows without an expert count as another expert.
    """
    return -(-m // m_tile) + experts
