"""Online softmax (Milakov and Gimelshein 2018): partial results and their merges.

Lanes, warps and splits each have partial results.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...ptx import WARP, Builder, LanePartition, Pointer, Value, Var, all_of, f32, u32
from ..pages import Spread
from ..vectors import dot, load_floats, store_floats

_MOST_STATIC = 46 << 10  # bytes of static shared memory, of 48 KB, that leave room for the marks
_PIECES = 4  # merged at a time by a warp, one dimension per lane
_GROUP_PITCH = WARP + 4  # floats from one group of 32 dimensions to the next
LOWEST = -3.0e38  # below every score; finite, so that no difference of two of them is NaN


class OnlineSoftmax:
    """Running softmax of some queries over the tokens of a lane group: FlashAttention's m, l and O.

    m is the highest score so far, l the sum of 2^(score - m), o the sum of values with these
    weights. Each lane group of a warp has its own tokens. Within a lane group, m and l are
    scattered, so that one lane computes a query's softmax. Every lane has its share of each query's
    o.
    """

    def __init__(self, k: Builder, queries: int, spread: Spread) -> None:
        self.k, self.spread = k, spread
        self.lanes = LanePartition(k, queries, spread.lanes)
        self.m: list[Var] = [k.var(f32, LOWEST) for _ in range(self.lanes.slots)]
        self.l: list[Var] = [k.var(f32, 0.0) for _ in range(self.lanes.slots)]
        self.o: list[list[Var]] = [
            [k.var(f32, 0.0) for _ in range(spread.width)] for _ in range(queries)
        ]

    def owned(self) -> list[Value]:
        """Returns the queries whose m and l this lane owns."""
        return [self.lanes.item(slot) for slot in range(self.lanes.slots)]

    def rescale(self, highest: Sequence[Value]) -> None:
        """Sets m = highest, and rescales l and o to it."""
        factors = [self.k.exp2(m - new) for m, new in zip(self.m, highest, strict=True)]
        for m, total, new, factor in zip(self.m, self.l, highest, factors, strict=True):
            m.set(new)
            total *= factor
        for o, factor in zip(self.o, self.lanes.all_gather(factors), strict=True):
            for value in o:
                value *= factor

    def add(
        self,
        scores: Sequence[Sequence[Value]],
        seen: Sequence[Value],
        values: Sequence[tuple[Sequence[Value], Value | float | None]],
        counts: Sequence[Value] | None = None,
    ) -> None:
        """Adds tokens: scattered scores in base 2, and values, each with its factor (None: 1).

        `counts`: each token represents several tokens with this sum of weights, relative to its
        score.
        """
        k = self.k
        highest: list[Value] = [*self.m]
        for token, ok in zip(scores, seen, strict=True):
            highest = [
                k.maximum(m, k.select(ok, s, LOWEST)) for m, s in zip(highest, token, strict=True)
            ]
        self.rescale(highest)
        for i, (token, ok) in enumerate(zip(scores, seen, strict=True)):
            p = [k.select(ok, k.exp2(s - m), 0.0) for s, m in zip(token, self.m, strict=True)]
            for total, weight in zip(self.l, p, strict=True):
                k.accumulate(total, weight, 1.0 if counts is None else counts[i])
            vector, factor = values[i]
            weights = self.lanes.all_gather(
                p if factor is None else [weight * factor for weight in p]
            )
            for o, weight in zip(self.o, weights, strict=True):
                for total, value in zip(o, vector, strict=True):
                    k.accumulate(total, weight, value)

    def add_sinks(self, scores: Sequence[Value], once: Value) -> None:
        """Adds scattered logits without values to an empty state, where `once` holds.

        `once` must hold in exactly one lane group.
        """
        k = self.k
        for m, total, score in zip(self.m, self.l, scores, strict=True):
            # minus infinity has no effect
            bounded = k.select(score < LOWEST, k.const(f32, LOWEST), score)
            m.set(k.select(once, bounded, LOWEST))
            total.set(k.select(once, k.const(f32, 1.0), 0.0))


@dataclass(frozen=True)
class Merged:
    """Merged softmax of a query. The lanes of one warp each hold some dimensions of o.

    o is zero beyond head_dim.
    """

    m: Value
    l: Value  # noqa: E741, as the papers call it
    o: list[Value]

    @classmethod
    def of(
        cls, k: Builder, marks: Sequence[tuple[Value, ...]], shares: Sequence[Sequence[Value]]
    ) -> Merged:
        """Merges several states with these m and l, and the lane's dimensions of their o."""
        highest = functools.reduce(k.maximum, [m for m, _ in marks])
        factors = [k.exp2(m - highest) for m, _ in marks]
        total = dot(k, factors, [total for _, total in marks])
        return cls(highest, total, [dot(k, factors, each) for each in zip(*shares, strict=True)])

    def normalized(self, k: Builder) -> list[Value]:
        """Returns o / l; zeros if no token was seen and l is 0."""
        scale = k.select(self.l == 0.0, k.const(f32, 0.0), k.const(f32, 1.0) / self.l)
        return [value * scale for value in self.o]


@dataclass(frozen=True)
class Piece:
    """Dimensions of the block's queries, concatenated, that one warp merges at a time.

    Attributes:
      query, group, first: the lane has dimensions from `first` on in a query's group of 32, which
        is number `group` of it.
      run: dimensions per lane: 1, which covers 32 of one query, or more.
      known: whether the piece exists in the block; None: yes.
    """

    query: Value
    group: Value
    first: Value
    run: int
    known: Value | None

    @classmethod
    def of_warp(
        cls, k: Builder, count: int, groups: int, worker: Value, workers: int, run: int
    ) -> Iterator[Piece]:
        """Yields the pieces of one of the warps that divide those of `count` queries."""
        pieces, lanes = count * groups // run, WARP // run
        for start in range(0, pieces, workers):
            number, known, first = worker + start, None, k.lane_id
            if start + workers > pieces:
                known = number < pieces
                number = k.minimum(number, pieces - 1)
            if run > 1:
                number, first = number * run + k.lane_id // lanes, k.lane_id % lanes * run
            yield cls(number // groups, number % groups, first, run, known)


@dataclass(frozen=True)
class Team:
    """Warps of a block that share the same queries, as seen by one warp.

    Attributes:
      warps: per team.
      count: teams of the block.
    """

    k: Builder
    warps: int
    count: int = 1

    @property
    def warp(self) -> Value:
        """Number of the warp in its team."""
        return self.k.warp_id if self.count == 1 else self.k.warp_id % self.warps

    def member(self, i: int, each: int) -> Value | int:
        """Returns the block-wide number of the team's item i, if each team has `each` items."""
        return i if self.count == 1 else self.k.warp_id // self.warps * each + i


class BlockState:
    """Softmax states of all warps of a block, in shared memory.

    Attributes:
      queries: of all teams.
      groups: groups of 32 dimensions per query.
      marks: m and l, f32 (a team's warps, queries of all teams, 2).
      parts: o, f32 (a team's warps, queries of all teams, 36 per 32 dimensions). The padding of
        four avoids bank conflicts between lanes that store adjacent runs.
    """

    def __init__(
        self, k: Builder, queries: int, head_dim: int, team: Team, shift: int | None = None
    ) -> None:
        """Allocates the state.

        Args:
          shift: banks (a multiple of 4) from a query to the next; None: no extra padding.
        """
        self._k, self._head_dim, self._team = k, head_dim, team
        self._places: dict[str, Pointer] = {}  # of the team's query 0, by the run's first
        self.queries, self.groups = team.count * queries, -(-head_dim // WARP)
        pitch = self.groups * _GROUP_PITCH
        pitch += 0 if shift is None else (shift - pitch) % WARP
        sums = team.warps, self.queries
        self.marks = k.shared("warp_marks", f32, (*sums, 2))
        over = math.prod(sums) * pitch * f32.size > _MOST_STATIC
        self.parts = k.shared("warp_parts", f32, (*sums, pitch), dynamic=over)

    def place(self, query: Value, first: Value) -> Pointer:
        """Returns the address of the warp's o for a query of the block, from `first` on."""
        if self.groups > 1:
            first = first + (first // WARP) * (_GROUP_PITCH - WARP)
        return self.parts.at(self._team.warp, query).at(first)

    def team_place(self, i: int, first: Value) -> Pointer:
        """Returns `place` for query i of the team; the queries of a run share one address."""
        if first.name not in self._places:
            number = self.number(0)
            query = self._k.const(u32, number) if isinstance(number, int) else number
            self._places[first.name] = self.place(query, first)
        return self._places[first.name].at(i * self.parts.shape[-1])

    def share(self, piece: Piece, warp: int = 0) -> Pointer:
        """Returns the address of the lane's dimensions of a piece in a warp's o."""
        place = self.parts.at(warp, piece.query)
        return place.at(piece.group * _GROUP_PITCH + piece.first)

    def merged(self, run: int = 1) -> Iterator[list[tuple[Piece, Merged]]]:
        """Yields this warp's pieces, some at a time, merged over the warps that have them.

        All threads must reach it, after storing their warp's state.
        """
        k, team = self._k, self._team
        k.barrier()
        workers = team.warps * team.count
        shape = self.queries, self.groups
        pieces, done = Piece.of_warp(k, *shape, k.warp_id, workers, run), False
        while some := list(itertools.islice(pieces, max(1, _PIECES // run))):
            if done:
                k.warp_barrier()  # keeps ptxas from loading all pieces at once, and spilling
            done = True
            yield [(piece, self._merge(piece)) for piece in some]

    def number(self, i: int) -> Value | int:
        """Returns the block's number of the team's query i."""
        return self._team.member(i, self.queries // self._team.count)

    def _merge(self, piece: Piece) -> Merged:
        k, warps = self._k, range(self._team.warps)
        inside = piece.known  # another warp may be overwriting a piece with the block's result
        if self._head_dim % WARP:
            inside = all_of(inside, piece.group * WARP + piece.first < self._head_dim)
        marks = [self.marks.at(w, piece.query).load(vector=2) for w in warps]
        shares = [load_floats(self.share(piece, w), piece.run, where=inside) for w in warps]
        return Merged.of(k, marks, shares)


def merge_lanes(softmax: OnlineSoftmax, head_dim: int, team: Team) -> BlockState:
    """Merges every query of a team over its lanes; returns the state of the block's warps."""
    k, spread, queries = softmax.k, softmax.spread, len(softmax.o)
    if spread.lanes < WARP:
        _merge_lanes(softmax)
    state = BlockState(k, queries, head_dim, team)
    first_vector = k.lane_id < spread.lanes  # the other lanes hold the same
    for i, values in enumerate(softmax.o):
        query, slot = state.number(i), i % softmax.lanes.slots
        mark = softmax.m[slot], softmax.l[slot]
        owner = k.lane_id == softmax.lanes.owner(i)
        state.marks.at(team.warp, query).store(0, mark, where=owner)
        for run in spread.runs(values):
            place = state.team_place(i, run.first)
            store_floats(place, run.values, where=all_of(run.inside, first_vector))
    return state


def _merge_lanes(softmax: OnlineSoftmax) -> None:
    """Merges the warp's lane groups; afterwards each holds the full warp's state."""
    k, lanes = softmax.k, softmax.spread.lanes
    apart = {"lanes": WARP // lanes, "stride": lanes}
    softmax.rescale([k.warp_max(m, **apart) for m in softmax.m])
    for value in itertools.chain(softmax.l, *softmax.o):
        value.set(k.warp_sum(value, **apart))
