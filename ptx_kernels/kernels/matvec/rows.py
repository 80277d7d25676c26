"""Partitions weight rows over teams of warps; adds the partial sums of a team's lanes and warps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ... import formats
from ...ptx import WARP, Builder, Pointer, Value, Var, f32
from ..planes import Planes, input_planes
from ..vectors import load_floats
from .config import MatvecConfig

T = TypeVar("T", int, Value)


@dataclass(frozen=True)
class Matrix:
    """Packed weights (n, columns) as a kernel's operands."""

    format: str
    rows: int
    columns: int
    planes: Planes

    @property
    def block_size(self) -> int:
        return formats.get(self.format).block_size


@dataclass(frozen=True)
class BlockRow:
    """The single activation row and result row of a thread block, if the grid has several rows.

    Attributes:
      token: index of the activation row (u32).
      row: index of the result row (u32).
      experts: number of matrices in a stack, of which the thread block reads `expert` (u32); 0 and
        None mean that there is no stack.
      shared: whether one more matrix follows those of the stack (see `input_planes`).
    """

    token: Value
    row: Value
    experts: int = 0
    expert: Value | None = None
    shared: bool = False


def one_row(pointer: Pointer, row: Value | None) -> Pointer:
    """Returns row `row` (u32) of a buffer as (1, ...); if `row` is None, the full buffer."""
    return pointer if row is None else pointer.at(row).reshape(1, *pointer.shape[1:])


def matrix(
    k: Builder,
    format: str,
    n: int,
    columns: int,
    *,
    prefix: str = "",
    block_row: BlockRow | None = None,
    layers: int = 0,
    streamed: bool = False,
) -> Matrix:
    """Declares the planes of packed weights as operands; returns the `Matrix`.

    See `input_planes`.
    """
    stack: dict[str, Any] = {"layers": layers, "streamed": streamed}
    if block_row is not None:
        stack |= {"experts": block_row.experts, "expert": block_row.expert}
        stack["shared"] = block_row.shared
    return Matrix(format, n, columns, input_planes(k, format, n, columns, prefix=prefix, **stack))


@dataclass(frozen=True)
class Team:
    """A thread block's `warps_per_row` warps and the `rows_per_warp` weight rows that they compute.

    Attributes:
      row: the first row (u32). If n is not a multiple of a team's rows, the last team's rows
        overlap those before.
      number: index of the team in its thread block.
      member: index of the warp in its team (u32); None if the team has one warp.
      first: the first row that the team owns; a team past the end owns none. None means that every
        team owns all its rows.
      inside: whether the team owns rows; None means always.
      pair_stride: 0 means that rows are adjacent. Otherwise rows s apart form pairs, and `row` and
        `first` count rows in the order of pairs: 0, s, 1, s + 1, ..., 2 * s, 3 * s, ...
      next_team: the team that these warps process next (only with `config.ahead`); None otherwise.
      has_next: whether there is a next team; None if there is none.
    """

    row: Value
    number: Value
    member: Value | None
    first: Value | None
    inside: Value | None
    pair_stride: int = 0
    next_team: Team | None = None
    has_next: Value | None = None

    @property
    def start(self) -> Value:
        """Index of the team's first row in the matrix."""
        if not self.pair_stride:
            return self.row
        within = self.row % (2 * self.pair_stride)
        return self.row - within + (within >> 1)

    def offset(self, r: T) -> T:
        """Returns the distance from `start` to the team's row r; r: an int or u32."""
        return r if not self.pair_stride else (r >> 1) + (r & 1) * self.pair_stride

    def active(self, k: Builder) -> contextlib.AbstractContextManager:
        """Returns a context whose body teams without rows skip; it must not contain a barrier."""
        return contextlib.nullcontext() if self.inside is None else k.when(self.inside)


@dataclass(frozen=True)
class LaneResult:
    """The result that a lane finishes: of activation row `j` and the team's weight row `r`.

    It is result number base + lane of the team. `valid`: whether this lane finishes a result.
    """

    base: int
    j: Value | int
    r: Value
    valid: Value


def launch(k: Builder, config: MatvecConfig, *rows: int, times: int = 1) -> list[int]:
    """Sets the grid for matrices with these numbers of rows; returns the thread blocks of each.

    `times`: thread blocks along y, each of which has all the rows.
    """
    groups = [-(-n // config.block_rows) for n in rows]
    counts = groups
    if 0 < config.persistent < sum(groups):
        # rounded up: no more rounds than with an even split
        counts = [-(-config.persistent * each // sum(groups)) for each in groups]
    k.launch((sum(counts), times), WARP * config.warps, resident_blocks=config.resident_blocks)
    return counts


@contextlib.contextmanager
def teams(
    k: Builder,
    n: int,
    config: MatvecConfig,
    blocks: int,
    *,
    block: Value | None = None,
    pair_stride: int = 0,
) -> Iterator[Team]:
    """Yields the teams of thread block `block`, of `blocks` that divide n weight rows.

    `block` None means that the grid has no other thread blocks. `pair_stride`: see `Team`; n is
    then a multiple of twice that, and a warp has an even number of rows. All warps of a thread
    block run the body equally often.
    """
    groups = -(-n // config.block_rows)
    block = k.block_id() if block is None else block
    if blocks >= groups:
        yield team_of(k, n, config, block, pair_stride)
        return
    with k.loop(block, groups, blocks) as group:
        team = team_of(k, n, config, group, pair_stride)
        if config.ahead:
            next_group, last = group + blocks, groups - 1
            team = replace(
                team,
                next_team=team_of(k, n, config, k.minimum(next_group, last), pair_stride),
                has_next=next_group < groups,
            )
        yield team


def team_of(k: Builder, n: int, config: MatvecConfig, group: Value, pair_stride: int = 0) -> Team:
    """Returns a warp's team in the thread block that computes row group `group` (see `teams`)."""
    rows, count = config.rows_per_warp, config.warps // config.warps_per_row
    number, member = k.warp_id, None
    if config.warps_per_row > 1:
        number, member = k.warp_id // config.warps_per_row, k.warp_id % config.warps_per_row
    first = (group * count + number) * rows
    if n % (rows * count) == 0:
        return Team(first, number, member, None, None, pair_stride)
    return Team(k.minimum(first, n - rows), number, member, first, first < n, pair_stride)


class RowTotals:
    """Sums the `count` totals of each team over its lanes and warps."""

    def __init__(self, k: Builder, config: MatvecConfig, count: int, suffix: str) -> None:
        self._k, self._config = k, config
        warps = config.warps_per_row
        self._parts = (
            k.shared(f"parts{suffix}", f32, (config.warps // warps, count, warps))
            if warps > 1
            else None
        )

    def __call__(self, team: Team, totals: Sequence[Sequence[Var]]) -> list[list[Value]]:
        """Returns the sums of totals[r][j], in every lane of a team's first warp.

        With several warps per row it emits barriers, so every warp of the thread block must reach
        it.
        """
        k, parts = self._k, self._parts
        sums = [[k.warp_sum(total) for total in row] for row in totals]
        if parts is None or team.member is None:
            return sums
        if self._config.persistent:
            k.barrier()  # the previous round's parts have been read
        for i, value in enumerate(value for row in sums for value in row):
            parts.at(team.number, i, team.member).store(0, value, where=k.lane_id == 0)
        k.barrier()
        team_parts, warps, m = parts.at(team.number), self._config.warps_per_row, len(sums[0])

        def joined(i: int) -> Value:
            return functools.reduce(
                lambda a, b: a + b, load_floats(team_parts.at(i * warps), warps)
            )

        return [[joined(r * m + j) for j in range(m)] for r in range(len(sums))]
