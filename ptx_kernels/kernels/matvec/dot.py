"""Emits dot products of packed rows with activations: dp4a on int8, then scales, or f32."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from ... import formats
from ...formats.unpack.packed_row import PackedRow, Share, Tile
from ...ptx import WARP, Builder, Pointer, Value, Var, f32, u32
from ..vectors import dot
from .activations import Activations, ActivationTile
from .config import MatvecConfig
from .rows import Team


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


def _view(
    k: Builder,
    format: str,
    planes: Sequence[Pointer],
    config: MatvecConfig,
    m: int,
    team: Team,
    stream: Value,
) -> PackedRow:
    """Returns this lane's `PackedRow` on a team's rows, to be multiplied by m activations."""
    lanes = config.lanes_per_block(format)
    share = Share(
        team.start,
        stream,
        k.lane_id % lanes,
        lanes,
        floats=config.floats,
        broadcast=config.broadcast_header,
        activations=m,
    )
    return formats.get(format).row(k, planes, share)


class Early:
    """Packed weights of a team's first loop trip, prefetched into registers.

    `loaded[a][r]`: results of `PackedRow.load` for the lane's quantization block a and row r, in
    variables that every `load` refills.
    """

    def __init__(
        self, k: Builder, format: str, planes: Sequence[Pointer], m: int, config: MatvecConfig
    ) -> None:
        self._k, self._format, self._planes, self._m, self._config = k, format, planes, m, config
        self.loaded: Any = None

    def load(self, team: Team) -> None:
        """Starts the loads of a team's first loop trip."""
        k, config = self._k, self._config
        streams = team_streams(k, self._format, team, config)
        row = _view(k, self._format, self._planes, config, self._m, team, streams.number)
        self.set(
            [
                [row.load(team.offset(r), a * streams.count) for r in range(config.rows_per_warp)]
                for a in range(config.unroll)
            ]
        )

    def set(self, loaded: Any, *place: int) -> None:
        """Copies loaded values into the variables.

        `loaded`: results of `PackedRow.load`, all of them, or those of one (block, row) given by
        `place`.
        """
        if self.loaded is None:
            self.loaded = _variables(self._k, loaded)
            return
        variables = self.loaded
        for index in place:
            variables = variables[index]
        _fill(variables, loaded)


def _variables(k: Builder, loaded: Any) -> Any:
    """Returns new variables initialized with `loaded`, in the same nested structure."""
    if isinstance(loaded, Value):
        return k.var(loaded.type, loaded)
    if is_dataclass(loaded):
        return replace(loaded, **{f: _variables(k, v) for f, v in vars(loaded).items()})  # type: ignore[type-var]
    return None if loaded is None else [_variables(k, each) for each in loaded]


def _fill(variables: Any, loaded: Any) -> None:
    """Sets `variables` to the values in `loaded`, which has the same nested structure."""
    if isinstance(variables, Var):
        variables.set(loaded)
        return
    if is_dataclass(variables):
        variables, loaded = vars(variables).values(), vars(loaded).values()
    for variable, value in zip(variables or (), loaded or (), strict=True):
        _fill(variable, value)


class Dots:
    """A lane's partial dot products of a team's rows with m rows of activations.

    A warp's lanes form streams of `lanes_per_block` lanes. Stream s processes quantization blocks
    s, s + streams, ... of its rows. Every call of `add` adds to `totals[r][j]`, of weight row r and
    activation row j. Weights are read once for all m.

    Args:
      streams: as from `team_streams`, or a part of them.
      early: the first loop trip's weights; None if they are not prefetched.
    """

    def __init__(
        self,
        k: Builder,
        format: str,
        planes: Sequence[Pointer],
        team: Team,
        m: int,
        config: MatvecConfig,
        streams: Streams | None = None,
        early: Early | None = None,
    ) -> None:
        self._k, self._config, self._m, self._early = k, config, m, early
        self._block_size = formats.get(format).block_size
        self._dot = dot_f32 if config.floats else dot_q8_1
        streams = streams or team_streams(k, format, team, config)
        self._streams, self._stream = streams.count, streams.number
        self._row = _view(k, format, planes, config, m, team, self._stream)
        self._offsets = [team.offset(r) for r in range(config.rows_per_warp)]
        self.totals = [[k.var(f32, 0.0) for _ in range(m)] for _ in range(config.rows_per_warp)]

    def add(self, x: Activations, blocks: int) -> None:
        """Emits products of the rows' next `blocks` quantization blocks with `x`.

        `x` is used from its first column on.
        """
        k, row, unroll = self._k, self._row, self._config.unroll
        cursor = x.cursor(row, self._stream, self._block_size)

        every = range(len(self._offsets))

        def step(ahead: range) -> None:
            loaded = [[row.load(r, a * self._streams) for r in self._offsets] for a in ahead]
            for a, rows in zip(ahead, loaded, strict=True):
                self._block(cursor, a, rows, every)

        whole, rest = divmod(blocks, self._streams * unroll)
        steps, part = divmod(rest, self._streams)  # of the last trip
        if whole:
            # an extra copy of the last trip, without loads, would be as long as the loop
            with k.loop(0, whole, unroll=self._early is None) as trip:
                if self._early is None:
                    step(range(unroll))
                    row.advance(self._streams * unroll)
                else:
                    row.advance(self._streams * unroll)
                    trips = [whole + (a < steps) for a in range(unroll)]
                    self._trip(
                        self._early,
                        cursor,
                        [trip + 1 < count if count > 1 else None for count in trips],
                    )
                cursor.advance(self._streams * unroll)
        if whole and self._early is not None:
            for a in range(steps):  # loaded by the last full trip
                self._block(cursor, a, self._early.loaded[a], every)
        else:
            step(range(steps))
        if part:
            with k.when(self._stream < part):
                step(range(steps, steps + 1))
        if rest:
            row.advance(rest)

    def _block(
        self,
        cursor: Any,
        a: int,
        loaded: Sequence[Any],
        rows: Sequence[int],
        x: Sequence[ActivationTile] = (),
    ) -> None:
        """Emits products of the lane's quantization block `a` of a loop trip, for some weight rows.

        `loaded`: results of `PackedRow.load`. `x`: the block's activations, if already loaded.
        """
        tiles = [self._row.unpack(loaded[r]) for r in rows]
        for j in range(self._m):
            own = x[j] if x else cursor.load(j, a * self._streams)
            self._dot(self._k, tiles, own, [self.totals[r][j] for r in rows])

    def _trip(self, early: Early, cursor: Any, goes_on: Sequence[Value | None]) -> None:
        """Emits a loop trip on prefetched weights, and refills each register with the next trip's.

        With a single quantization block, rows are replaced one by one, so that a load is at least
        half a trip before its first use. `goes_on`: for each quantization block, whether the next
        trip has one; None means no.
        """
        k, row, rows = self._k, self._row, range(len(self._offsets))
        apart = len(goes_on) == 1 and len(rows) > 1
        for a, following in enumerate(goes_on):
            x = [cursor.load(j, a * self._streams) for j in range(self._m)] if apart else []
            for unit in [[r] for r in rows] if apart else [[*rows]]:
                self._block(cursor, a, early.loaded[a], unit, x)
                if following is None:
                    continue
                with k.when(following):
                    for r in unit:
                        early.set(row.load(self._offsets[r], a * self._streams), a, r)


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
    following = [*zip(tile.runs[1:], x.scales[1:], strict=True), (None, None)]
    for run, values, x_scale, (next_run, next_scale) in zip(
        tile.runs, x.runs, x.scales, following, strict=True
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
