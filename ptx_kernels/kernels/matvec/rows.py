"""Rows of packed matrices: partition over teams of warps, sums over a team's lanes and warps."""

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
    """Packed weights (n, columns): a kernel's operands."""

    format: str
    rows: int
    columns: int
    planes: Planes

    @property
    def block_size(self) -> int:
        return formats.get(self.format).block_size


@dataclass(frozen=True)
class BlockRow:
    """The one row of activations and of results that a thread block has, where a grid has several.

    Attributes:
      token: the row of activations (u32); `row`: that of the results (u32).
      experts: matrices of the stacks, of which the block reads `expert` (u32); 0, None: no stacks.
    """

    token: Value
    row: Value
    experts: int = 0
    expert: Value | None = None


def one_row(pointer: Pointer, row: Value | None) -> Pointer:
    """A buffer's row `row` (u32) as all the rows that there are; None: all of them."""
    return pointer if row is None else pointer.at(row).reshape(1, *pointer.shape[1:])


def matrix(
    k: Builder,
    format: str,
    n: int,
    columns: int,
    *,
    prefix: str = "",
    own: BlockRow | None = None,
    layers: int = 0,
    streamed: bool = False,
) -> Matrix:
    """The planes of packed weights as operands (see `input_planes`)."""
    stack: dict[str, Any] = {"layers": layers, "streamed": streamed}
    if own is not None:
        stack |= {"experts": own.experts, "expert": own.expert}
    return Matrix(format, n, columns, input_planes(k, format, n, columns, prefix=prefix, **stack))


@dataclass(frozen=True)
class Team:
    """`rows_per_warp` rows and a block's `warps_per_row` warps that compute them.

    Attributes:
      row: the first row (u32). Where the rows don't come out even, the last team's reach back over
        its neighbour's.
      number: of the team in its block; `member`: of the warp in its team (u32); None: its only one.
      first: the first row that is the team's own; a team past the end has none. None: every team
        owns all its rows.
      inside: whether it has rows of its own; None: always.
      apart: 0: rows are neighbours. Else they are pairs of rows so far apart, and `row` and `first`
        count rows in the order of pairs: 0, apart, 1, apart + 1, ..., 2 * apart, 3 * apart, ...
      following: the team that the same warps are next; None: nobody asked. `goes_on`: whether they
        are one; None: they are not.
    """

    row: Value
    number: Value
    member: Value | None
    first: Value | None
    inside: Value | None
    apart: int = 0
    following: Team | None = None
    goes_on: Value | None = None

    @property
    def start(self) -> Value:
        """The first row's place in the matrix."""
        if not self.apart:
            return self.row
        within = self.row % (2 * self.apart)
        return self.row - within + (within >> 1)

    def offset(self, r: T) -> T:
        """The places from `start` to row r of the team; r: an integer or u32."""
        return r if not self.apart else (r >> 1) + (r & 1) * self.apart

    def active(self, k: Builder) -> contextlib.AbstractContextManager:
        """A context that teams without rows skip; no barrier may lie in it."""
        return contextlib.nullcontext() if self.inside is None else k.when(self.inside)


@dataclass(frozen=True)
class Place:
    """A lane's value base + lane: of activations `j` and the team's row `r`, finished if `mine`."""

    base: int
    j: Value | int
    r: Value
    mine: Value


def launch(k: Builder, config: MatvecConfig, *rows: int, times: int = 1) -> list[int]:
    """Sets the launch geometry for matrices of so many rows; returns the blocks of each.

    `times`: blocks along y, each of which has all the rows.
    """
    groups = [-(-n // config.block_rows) for n in rows]
    counts = groups
    if 0 < config.persistent < sum(groups):
        # up: no more rounds than even
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
    apart: int = 0,
) -> Iterator[Team]:
    """Deals n rows to the teams of `blocks` blocks, of which this is `block`.

    `block` None: the grid is theirs alone. `apart`: see `Team`; n is then a multiple of twice that,
    and a warp's rows are an even number. All warps of a block run the body equally often.
    """
    groups = -(-n // config.block_rows)
    block = k.block_id() if block is None else block
    if blocks >= groups:
        yield team_of(k, n, config, block, apart)
        return
    with k.loop(block, groups, blocks) as group:
        team = team_of(k, n, config, group, apart)
        if config.ahead:
            following, last = group + blocks, groups - 1
            team = replace(
                team,
                following=team_of(k, n, config, k.minimum(following, last), apart),
                goes_on=following < groups,
            )
        yield team


def team_of(k: Builder, n: int, config: MatvecConfig, group: Value, apart: int = 0) -> Team:
    """The team that a warp is in, of the block that computes `group` of n rows (see `teams`)."""
    rows, count = config.rows_per_warp, config.warps // config.warps_per_row
    number, member = k.warp_id, None
    if config.warps_per_row > 1:
        number, member = k.warp_id // config.warps_per_row, k.warp_id % config.warps_per_row
    first = (group * count + number) * rows
    if n % (rows * count) == 0:
        return Team(first, number, member, None, None, apart)
    return Team(k.minimum(first, n - rows), number, member, first, first < n, apart)


class RowTotals:
    """Adds the lanes' and the warps' parts of the `count` totals of each team."""

    def __init__(self, k: Builder, config: MatvecConfig, count: int, suffix: str) -> None:
        self._k, self._config = k, config
        warps = config.warps_per_row
        self._parts = (
            k.shared(f"parts{suffix}", f32, (config.warps // warps, count, warps))
            if warps > 1
            else None
        )

    def __call__(self, team: Team, totals: Sequence[Sequence[Var]]) -> list[list[Value]]:
        """The sums of totals[r][j], known to every lane of a team's first warp.

        With several warps a row there are barriers in it, so every warp of the block must come
        here.
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
        mine, warps, m = parts.at(team.number), self._config.warps_per_row, len(sums[0])

        def joined(i: int) -> Value:
            return functools.reduce(lambda a, b: a + b, load_floats(mine.at(i * warps), warps))

        return [[joined(r * m + j) for j in range(m)] for r in range(len(sums))]
