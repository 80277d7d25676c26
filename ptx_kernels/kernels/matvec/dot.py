"""Emits dot products of packed rows with activations: dp4a on int8, then scales, or f32."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import formats
from ...formats.unpack.packed_row import PackedRow, Share, Tile
from ...ptx import WARP, Builder, Pointer, Value, Var, f32, u32
from ..vectors import dot
from .activations import Activations, ActivationTile
from .config import MatvecConfig
from .rows import Matrix, Team


@dataclass(frozen=True)
class Streams:
    """Groups of lanes (streams) that share a row's quantization blocks.

    `number` (u32) is the index of this lane's stream, of `count`.
    """

    count: int
    number: Value


def team_streams(k: Builder, format: str, team: Team, config: MatvecConfig) -> Streams:
    """Returns the streams of all of a team's warps, with this lane's stream."""
    lanes = config.lanes_per_block(format)
    number = k.lane_id // lanes
    if team.member is not None:
        number = team.member * (WARP // lanes) + number
    return Streams(config.streams(format), number)


@dataclass(frozen=True)
class MatrixLoads:
    """Loads of a packed matrix's rows, which are multiplied by m rows of activations.

    Attributes:
      planes: those of the matrix, without a stack.
    """

    k: Builder
    matrix: Matrix
    planes: Sequence[Pointer]
    m: int
    config: MatvecConfig

    @property
    def has_trips(self) -> bool:
        """Whether a row has at least one full loop trip."""
        return self.matrix.columns >= self.config.trip(self.matrix.format)

    def streams(self, team: Team) -> Streams:
        """Returns `team_streams` of this matrix."""
        return team_streams(self.k, self.matrix.format, team, self.config)

    def row(self, team: Team, stream: Value) -> PackedRow:
        """Returns this lane's `PackedRow` on a team's rows."""
        lanes = self.config.lanes_per_block(self.matrix.format)
        share = Share(
            team.start,
            stream,
            self.k.lane_id % lanes,
            lanes,
            floats=self.config.floats,
            broadcast=self.config.broadcast_header,
            activations=self.m,
        )
        return formats.get(self.matrix.format).row(self.k, self.planes, share)


class Dots:
    """A lane's partial dot products of a team's rows with m rows of activations.

    A warp's lanes form streams of `lanes_per_block` lanes. Stream s processes quantization blocks
    s, s + streams, ... of its rows. Every call of `add` adds to `totals[r][j]`, of weight row r and
    activation row j. Weights are read once for all m.

    Args:
      streams: as from `team_streams`, or a part of them.
    """

    def __init__(self, loads: MatrixLoads, team: Team, streams: Streams | None = None) -> None:
        k, config, m = loads.k, loads.config, loads.m
        self._k, self._config, self._m, self.block_size = k, config, m, loads.matrix.block_size
        self._dot = dot_f32 if config.floats else dot_q8_1
        streams = streams or loads.streams(team)
        self._streams, self._stream = streams.count, streams.number
        self._row = loads.row(team, self._stream)
        self._offsets = [team.offset(r) for r in range(config.rows_per_warp)]
        self.totals = [[k.var(f32, 0.0) for _ in range(m)] for _ in range(config.rows_per_warp)]

    def add(self, x: Activations, blocks: int) -> None:
        """Emits products of the rows' next `blocks` quantization blocks with `x`.

        `x` is used from its first column on.
        """
        cursor = x.cursor(self._row, self._stream, self.block_size)
        trips, rest = divmod(blocks, self._streams * self._config.unroll)
        steps, part = divmod(rest, self._streams)
        self._add_trips(cursor, trips, steps)
        if part:
            with self._k.when(self._stream < part):
                self._add_blocks(cursor, range(steps, steps + 1))
        if rest:
            self._row.advance(rest)

    def _add_trips(self, cursor: Any, trips: int, steps: int) -> None:
        """Emits a loop of `trips` trips, and after it the first `steps` blocks of another trip."""
        unroll = self._config.unroll
        if trips:
            with self._k.loop(0, trips):
                self._add_blocks(cursor, range(unroll))
                self._row.advance(self._streams * unroll)
                cursor.advance(self._streams * unroll)
        self._add_blocks(cursor, range(steps))

    def _add_blocks(self, cursor: Any, blocks: range) -> None:
        """Emits products of the lane's quantization blocks `blocks` of a trip, all loaded first."""
        loaded = [[self._row.load(r, a * self._streams) for r in self._offsets] for a in blocks]
        for a, rows in zip(blocks, loaded, strict=True):
            self._add_block(cursor, a, rows, range(len(rows)))

    def _add_block(
        self,
        cursor: Any,
        a: int,
        loaded: Sequence[Any],
        rows: Sequence[int],
        x: Sequence[ActivationTile] = (),
    ) -> None:
        """Emits products of the lane's quantization block `a` of a trip, for some weight rows.

        `loaded`: results of `PackedRow.load`. `x`: the block's activations, if already loaded.
        """
        tiles = [self._row.unpack(loaded[r]) for r in rows]
        for j in range(self._m):
            activations = x[j] if x else cursor.load(j, a * self._streams)
            self._dot(self._k, tiles, activations, [self.totals[r][j] for r in rows])


def dot_q8_1(k: Builder, tiles: Sequence[Tile], x: ActivationTile, totals: Sequence[Var]) -> None:
    """Emits totals[r] += tiles[r] . x for this lane: dp4a over each run, then the scales.

    A minimum needs no dot product, since the sums of the activations are known.
    """
    # run sums are computed before the products, group sums after the first: fewer registers
    sums = _run_sums(k, x) if tiles[0].minimum_d is not None else ()
    for tile, total in zip(tiles, totals, strict=True):
        k.accumulate(total, _scaled_integers(k, tile, x), tile.d)
        sums = sums or _minimum_sums(k, tile, x)
        _subtract_minimums(k, tile, sums, total)


def _run_sums(k: Builder, x: ActivationTile) -> Sequence[Value]:
    """Emits scale * sum of the activations of each run."""
    ones, sums = k.const(u32, 0x01010101), []
    for values, scale in zip(x.runs, x.scales, strict=True):
        total: Any = 0
        for value in values:
            total = k.dp4a(ones, value, total, unsigned_a=True)
        sums.append(total.to(f32) * scale)
    return sums


def _minimum_sums(k: Builder, tile: Tile, x: ActivationTile) -> Sequence[Value]:
    """Returns the scaled sums of activations that the tile's minimums are multiplied by."""
    if tile.minimum_group is None:
        return x.sums
    return [k.select(tile.minimum_group == 0, *x.sums)]


def _scaled_integers(k: Builder, tile: Tile, x: ActivationTile) -> Value:
    """Emits the sum over runs of (quants . values) * the run's scale * the activations' scale."""
    total: Any = None
    part: Any = 0
    next_runs = [*zip(tile.runs[1:], x.scales[1:], strict=True), (None, None)]
    for run, values, x_scale, (next_run, next_scale) in zip(
        tile.runs, x.runs, x.scales, next_runs, strict=True
    ):
        if run.less:
            less: Any = 0
            for a, b in zip(run.less, values, strict=True):
                less = k.dp4a(a, b, less, unsigned_a=True)
            part += less * -run.less_factor
        for a, b in zip(run.quants, values, strict=True):
            part = k.dp4a(a, b, part, unsigned_a=not tile.signed)
        if next_run is not None and next_run.scale is run.scale and next_scale is x_scale:
            continue  # runs of one group that share a scale, or have none, are summed as integers
        product = _scaled(part, run.scale)
        if run.unit != 1:
            x_scale = x_scale * run.unit
        total = product * x_scale if total is None else k.fma(product, x_scale, total)
        part = 0
    return total


def _scaled(part: Value, scale: Value | None) -> Value:
    """Emits an integer sum times its run's scale, as f32; a product of two integers is exact."""
    if scale is None:
        return part.to(f32)
    return part.to(f32) * scale if scale.type is f32 else (part * scale).to(f32)


def dot_f32(k: Builder, tiles: Sequence[Tile], x: ActivationTile, totals: Sequence[Var]) -> None:
    """Emits totals[r] += tiles[r] . x for this lane, in f32.

    An offset or a minimum takes one multiply-add per run, with the sum of the run's activations.
    """
    sums = [functools.reduce(operator.add, run) for run in x.runs] if tiles[0].uses_sums else ()
    for tile, total in zip(tiles, totals, strict=True):
        k.accumulate(total, _scaled_floats(k, tile, x, sums), tile.d)
        _subtract_minimums(k, tile, sums, total)


def _scaled_floats(k: Builder, tile: Tile, x: ActivationTile, sums: Sequence[Value]) -> Value:
    """Emits the sum over runs of ((quants - offset) . values) * scale."""
    total: Any = None
    for i, (run, values) in enumerate(zip(tile.runs, x.runs, strict=True)):
        part = dot(k, run.quants, values)
        if run.offset:
            part = k.fma(sums[i], -run.offset, part)
        if total is None:
            total = part if run.scale is None else part * run.scale
        else:
            total = total + part if run.scale is None else k.fma(part, run.scale, total)
    return total


def _subtract_minimums(k: Builder, tile: Tile, sums: Sequence[Value], total: Var) -> None:
    if tile.minimum_d is not None:
        k.accumulate(total, dot(k, tile.minimums, sums), -tile.minimum_d)
    elif tile.minimums:
        for minimum, value in zip(tile.minimums, sums, strict=True):
            k.accumulate(total, minimum, -value)
