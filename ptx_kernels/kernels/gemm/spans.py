"""Spans: which weight rows, which activations and which columns a thread block has."""

from __future__ import annotations

from dataclasses import dataclass

from ...ptx import Builder, Value, s32, u32


class Span:
    """Span of `size` rows of `total`, from `start` on.

    The last span may overlap its neighbour; a single one may be cut short.
    """

    def __init__(self, k: Builder, number: Value, total: int, size: int) -> None:
        self._total, self._first, self.size = total, number * size, size
        self.start = self._first if total <= size else k.minimum(self._first, total - size)

    def owns(self, row: Value) -> Value | None:
        """Condition for a row to be this span's and no other's; None: it always is."""
        if self._total % self.size == 0:
            return None
        return row < self._total if self._total < self.size else row >= self._first


@dataclass(frozen=True)
class StepSpan:
    """Steps of a thread block along the columns.

    Attributes:
      first: its first one, u32; 0: of blocks that share no columns.
      total: steps of all blocks that share the columns; the last ones may lie beyond the end.
    """

    first: Value | int = 0
    total: int = 0

    def after(self, place: Value, nbytes: int) -> Value:
        """`place` and the bytes of the steps before the first one, of `nbytes` each."""
        return place if isinstance(self.first, int) else place + self.first * nbytes

    def rest(self, row_bytes: int, nbytes: int) -> Value | int:
        """Bytes of a row from the first step of `nbytes` on, s32; below 0 beyond the end."""
        if isinstance(self.first, int):
            return row_bytes
        return self.first.bits(s32) * -nbytes + row_bytes


ALL = StepSpan()  # from the first step on, none of which lies beyond the end


class ExpertTile:
    """Span of `size` rows of `total` from `start` on, of which those of one expert count.

    `expert` (u32) may be none that there is; the rows from `first` to `end` are the tile's.
    """

    def __init__(self, k: Builder, number: Value, count: int, total: int, size: int) -> None:
        tile = k.input("tiles", s32, (count, 3)).at(number)
        self.expert, self.first, self.end = (tile.load(i).bits(u32) for i in range(3))
        self.size = size
        self.start = k.const(u32, 0) if total <= size else k.minimum(self.first, total - size)

    def owns(self, row: Value) -> Value:
        """Condition for a row to be the tile's."""
        return (row >= self.first) & (row < self.end)


def tile_count(m: int, experts: int, m_tile: int) -> int:
    """Tiles of m rows, or of as many sorted by expert, where each ends with a tile of its own.

    Rows of no expert come as one more.
    """
    return -(-m // m_tile) + experts
