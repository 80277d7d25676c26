"""Stores a projection's results as attention heads: applies RoPE, appends to KV cache pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...ptx import Builder, Pointer, Value, all_of, u32
from ..pages import Pages, store_runs
from ..vectors import Run
from .rows import LaneResult, Team


@dataclass(frozen=True)
class Rotation:
    """RoPE angles f32 (tokens, rope_dim / 2), and the dimension order (see `rope_append`)."""

    cos: Pointer
    sin: Pointer
    interleaved: bool


@dataclass(frozen=True)
class PageRows:
    """KV cache pages (of a dtype without scales), and each token's slot in them, s32 (tokens,)."""

    pages: Pages
    slots: Pointer


@dataclass(frozen=True)
class HeadRows:
    """Stores of a projection's rows, each row one dimension of a head, for all tokens.

    A warp has both dimensions of a RoPE pair, in even and odd lanes.

    Attributes:
      head_dim: rows per head.
      rotation: None means that values are not rotated.
      target: f32 (tokens, heads * head_dim), or pages; a slot outside the pages is skipped.
    """

    k: Builder
    head_dim: int
    rotation: Rotation | None
    target: Pointer | PageRows

    @property
    def pair_stride(self) -> int:
        """Rows between the two dimensions of a RoPE pair; 0 means that they are adjacent."""
        neighbours = self.rotation is None or self.rotation.interleaved
        return 0 if neighbours else self.head_dim // 2

    def load(self, team: Team, result: LaneResult) -> list[Value]:
        """Starts the loads of the token's slot and RoPE angle; returns them for `store`."""
        loaded: list[Value] = []
        if isinstance(self.target, PageRows):
            loaded.append(self.target.slots.at(result.j).load(where=result.valid))
        if self.rotation is not None:
            where = all_of(result.valid, self._rotated(team, result))
            angles = self.rotation.cos, self.rotation.sin
            loaded += [
                each.at(result.j, self._pair(team, result)).load(where=where) for each in angles
            ]
        return loaded

    def store(self, team: Team, result: LaneResult, value: Value, loaded: Iterator[Value]) -> None:
        """Emits the rotation and store of a lane's value. Full warps must reach it.

        `loaded`: iterator over the results of `load`.
        """
        k, target = self.k, self.target
        slot = next(loaded) if isinstance(target, PageRows) else None
        if self.rotation is not None:
            cos, sin = next(loaded), next(loaded)
            turned = value * cos + k.shuffle_xor(value, 1) * k.select(
                (result.r & 1) == 0, -sin, sin
            )
            rotated = self._rotated(team, result)
            value = turned if rotated is None else k.select(rotated, turned, value)
        head, dim = self._row(team, result) // self.head_dim, self._dim(team, result)
        if not isinstance(target, PageRows):
            target.at(result.j, head * self.head_dim + dim).store(0, value, where=result.valid)
            return
        assert slot is not None
        slot, (num_pages, _, page_size, _) = slot.bits(u32), target.pages.rows.shape
        where = result.valid & (slot < min(num_pages * page_size, 1 << 31))  # negative: a huge u32
        row = target.pages.rows.at(slot // page_size, head, slot % page_size)
        store_runs(k, row, [Run(dim, [value], None)], where)

    def _row(self, team: Team, result: LaneResult) -> Value:
        return team.row + result.r

    def _pair(self, team: Team, result: LaneResult) -> Value:
        """Returns the index of the lane's RoPE pair in its head."""
        return self._row(team, result) % self.head_dim >> 1

    def _dim(self, team: Team, result: LaneResult) -> Value:
        if not self.pair_stride:
            return self._row(team, result) % self.head_dim
        return self._pair(team, result) + (result.r & 1) * self.pair_stride

    def _rotated(self, team: Team, result: LaneResult) -> Value | None:
        """Returns whether the lane's pair is rotated; None means that all pairs are."""
        assert self.rotation is not None
        pairs = self.rotation.cos.shape[1]
        return None if 2 * pairs == self.head_dim else self._pair(team, result) < pairs
