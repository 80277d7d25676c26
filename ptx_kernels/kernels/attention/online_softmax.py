"""Online softmax (Milakov and Gimelshein 2018): partial results and their merges.

Lanes, warps and splits each have partial results.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...ptx import WARP, Builder, LanePartition, Pointer, Value, Var, all_of, f32
from ..pages import Spread
from ..vectors import dot, store_floats

_MOST_STATIC = 47 << 10  # bytes of static shared memory, of 48 KB, that leave room for the marks
LOWEST = -3.0e38  # below every score; finite, so that no difference of two of them is NaN


class OnlineSoftmax:
    """Running softmax of some queries over the tokens of a lane group: FlashAttention's m, l and O.

    m is the highest score so far, l the sum of 2^(score - m), o the values weighted by these.
    A warp's lane groups have tokens of their own. Within one, m and l are scattered, so that a
    query's softmax is the work of one lane; of every query's o a lane has its share.
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
        """The queries whose m and l this lane has."""
        return [self.lanes.item(slot) for slot in range(self.lanes.slots)]

    def rescale(self, highest: Sequence[Value]) -> None:
        """m = highest, with l and o relative to it."""
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

        `counts`: the token stands for tokens that are already added up to this sum of weights,
        relative to its score.
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
        """Adds scattered logits that have no value to an empty state, where `once` holds.

        `once` holds in one lane group.
        """
        k = self.k
        for m, total, score in zip(self.m, self.l, scores, strict=True):
            # minus infinity counts for nothing
            bounded = k.select(score < LOWEST, k.const(f32, LOWEST), score)
            m.set(k.select(once, bounded, LOWEST))
            total.set(k.select(once, k.const(f32, 1.0), 0.0))


@dataclass(frozen=True)
class Merged:
    """A query's softmax over the whole block, in the lanes of one warp.

    `o[i]` of lane l is dimension l + 32 i, and zero beyond head_dim.
    """

    m: Value
    l: Value  # noqa: E741, as the papers call it
    o: list[Value]

    def normalized(self, k: Builder) -> list[Value]:
        """o / l; zeros where no token was seen, so that l is 0."""
        scale = k.select(self.l == 0.0, k.const(f32, 0.0), k.const(f32, 1.0) / self.l)
        return [value * scale for value in self.o]


@dataclass(frozen=True)
class Team:
    """The warps of a block that have the same queries, from a warp's point of view.

    Attributes:
      warps: of a team.
      count: teams of the block.
    """

    k: Builder
    warps: int
    count: int = 1

    @property
    def warp(self) -> Value:
        """The warp's number in its team."""
        return self.k.warp_id if self.count == 1 else self.k.warp_id % self.warps

    def member(self, i: int, each: int) -> Value | int:
        """The number in the block of what is number i of the `each` that every team has."""
        return i if self.count == 1 else self.k.warp_id // self.warps * each + i


class BlockState:
    """The softmax of every warp of a block, in shared memory.

    Attributes:
      marks: m and l, f32 (queries of all teams, a team's warps, 2).
      parts: o, f32 (queries of all teams, a team's warps, head_dim).
    """

    def __init__(self, k: Builder, queries: int, head_dim: int, team: Team) -> None:
        self._k, self._queries, self._team = k, queries, team
        sums = team.count * queries, team.warps
        self.marks = k.shared("warp_marks", f32, (*sums, 2))
        over = math.prod(sums) * head_dim * f32.size > _MOST_STATIC
        self.parts = k.shared("warp_parts", f32, (*sums, head_dim), dynamic=over)

    def merged(self) -> Iterator[tuple[int, Merged]]:
        """Each query's number in its team and its softmax; the body runs in one warp.

        All threads must come here, once they have stored their warp's.
        """
        k, team = self._k, self._team
        k.barrier()
        for i in range(self._queries):
            with k.when(team.warp == i % team.warps):
                yield i, _merge_warps(k, self.marks, self.parts, team.member(i, self._queries))


def merge_block(softmax: OnlineSoftmax, head_dim: int, team: Team) -> Iterator[tuple[int, Merged]]:
    """Merges every query of a team over its lanes and warps, in shared memory.

    Yields as `BlockState.merged` does.
    """
    k, spread, queries = softmax.k, softmax.spread, len(softmax.o)
    if spread.lanes < WARP:
        _merge_lanes(softmax)
    state = BlockState(k, queries, head_dim, team)
    first_vector = k.lane_id < spread.lanes  # the other lanes hold the same
    for i, values in enumerate(softmax.o):
        query, slot = team.member(i, queries), i % softmax.lanes.slots
        mark = softmax.m[slot], softmax.l[slot]
        owner = k.lane_id == softmax.lanes.owner(i)
        state.marks.at(query, team.warp).store(0, mark, where=owner)
        row = state.parts.at(query, team.warp)
        for run in spread.runs(values):
            store_floats(row.at(run.first), run.values, where=all_of(run.inside, first_vector))
    yield from state.merged()


def _merge_lanes(softmax: OnlineSoftmax) -> None:
    """Merges the warp's lane groups; afterwards each holds the whole warp's state."""
    k, lanes = softmax.k, softmax.spread.lanes
    apart = {"lanes": WARP // lanes, "stride": lanes}
    softmax.rescale([k.warp_max(m, **apart) for m in softmax.m])
    for value in itertools.chain(softmax.l, *softmax.o):
        value.set(k.warp_sum(value, **apart))


def _merge_warps(k: Builder, marks: Pointer, parts: Pointer, query: Value | int) -> Merged:
    _, warps, head_dim = parts.shape
    each = [marks.at(query, w).load(vector=2) for w in range(warps)]
    highest = functools.reduce(k.maximum, [m for m, _ in each])
    factors = [k.exp2(m - highest) for m, _ in each]
    o = []
    for first in range(0, head_dim, WARP):
        inside = k.lane_id < head_dim - first if first + WARP > head_dim else None
        loaded = [parts.at(query, w, k.lane_id).load(first, where=inside) for w in range(warps)]
        o.append(dot(k, factors, loaded))
    return Merged(highest, dot(k, factors, [total for _, total in each]), o)
