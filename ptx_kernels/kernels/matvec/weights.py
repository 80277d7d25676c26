"""Weights of a mat-vec: loads them when the dot products need them, or prefetches them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from ...ptx import Builder, Value, Var
from .activations import Activations
from .dot import Dots, MatrixLoads
from .rows import Team


@dataclass(frozen=True)
class Weights:
    """Matrices of one shape, multiplied by the same activations; loads weights when needed."""

    loads: Sequence[MatrixLoads]

    def dots(self, team: Team) -> Sequence[Dots]:
        """Returns the dot products, zero so far, of a team's rows of each matrix."""
        return [Dots(each, team) for each in self.loads]

    def add(self, dots: Sequence[Dots], team: Team, x: Activations, columns: int) -> None:
        """Emits the products of the rows' next `columns` columns with `x`."""
        for part in dots:
            with team.active(self.loads[0].k):
                part.add(x, columns // part.block_size)


class PrefetchedWeights(Weights):
    """Loads weights into registers one loop trip before the dot products need them.

    A matrix's first trip is loaded after the matrix before it, or after the team before it. A
    matrix with less than one trip is not prefetched.
    """

    @functools.cached_property
    def _trips(self) -> list[TripRegisters | None]:
        return [TripRegisters(each) if each.has_trips else None for each in self.loads]

    @property
    def first_trip(self) -> TripRegisters | None:
        """Registers for the first matrix's first trip; None if it is not prefetched."""
        return self._trips[0]

    def dots(self, team: Team) -> Sequence[Dots]:
        return [
            PrefetchedDots(each, team, trip) if trip else Dots(each, team)
            for each, trip in zip(self.loads, self._trips, strict=True)
        ]

    def add(self, dots: Sequence[Dots], team: Team, x: Activations, columns: int) -> None:
        for part, next_trip in zip(dots, [*self._trips[1:], None], strict=True):
            super().add([part], team, x, columns)
            if next_trip is not None:
                next_trip.load(team)
        if self.first_trip is not None and team.next_team is not None:
            assert team.has_next is not None
            with self.loads[0].k.when(team.has_next):
                self.first_trip.load(team.next_team)


class TripRegisters:
    """Packed weights of one loop trip, in registers.

    `loaded[a][r]`: results of `PackedRow.load` for the lane's quantization block a and row r, in
    variables that every `load` refills.
    """

    def __init__(self, loads: MatrixLoads) -> None:
        self._loads = loads
        self.loaded: Any = None

    def load(self, team: Team) -> None:
        """Starts the loads of a team's first loop trip."""
        config, streams = self._loads.config, self._loads.streams(team)
        row = self._loads.row(team, streams.number)
        loaded = [
            [row.load(team.offset(r), a * streams.count) for r in range(config.rows_per_warp)]
            for a in range(config.unroll)
        ]
        if self.loaded is None:
            self.loaded = _variables(self._loads.k, loaded)
        else:
            _fill(self.loaded, loaded)

    def refill(self, a: int, r: int, loaded: Any) -> None:
        """Replaces the registers of quantization block `a` and row `r`."""
        _fill(self.loaded[a][r], loaded)


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


class PrefetchedDots(Dots):
    """`Dots` of at least one loop trip, whose first trip's weights are in registers."""

    def __init__(self, loads: MatrixLoads, team: Team, trip: TripRegisters) -> None:
        super().__init__(loads, team)
        self._trip = trip

    def _add_trips(self, cursor: Any, trips: int, steps: int) -> None:
        streams, unroll = self._streams, self._config.unroll
        # an extra copy of the last trip, without loads, would be as long as the loop
        with self._k.loop(0, trips, unroll=False) as number:
            self._row.advance(streams * unroll)
            counts = [trips + (a < steps) for a in range(unroll)]  # of trips with block a
            self._add_trip(cursor, [number + 1 < count if count > 1 else None for count in counts])
            cursor.advance(streams * unroll)
        for a in range(steps):  # loaded by the last full trip
            self._add_block(cursor, a, self._trip.loaded[a], range(len(self._offsets)))

    def _add_trip(self, cursor: Any, has_next: Sequence[Value | None]) -> None:
        """Emits a loop trip on prefetched weights, and refills each register with the next trip's.

        With a single quantization block, rows are replaced one by one, so that a load is at least
        half a trip before its first use. `has_next`: for each quantization block, whether the next
        trip has one; None means no.
        """
        k, trip, rows = self._k, self._trip, range(len(self._offsets))
        row_by_row = len(has_next) == 1 and len(rows) > 1
        for a, has_block in enumerate(has_next):
            offset = a * self._streams
            x = [cursor.load(j, offset) for j in range(self._m)] if row_by_row else []
            for group in [[r] for r in rows] if row_by_row else [[*rows]]:
                self._add_block(cursor, a, trip.loaded[a], group, x)
                if has_block is None:
                    continue
                with k.when(has_block):
                    for r in group:
                        trip.refill(a, r, self._row.load(self._offsets[r], offset))
