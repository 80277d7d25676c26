"""Online softmax (Milakov and Gimelshein 2018) of lanes, warps and splits, and their merges."""

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
    """Running softmax of a lane group's queries over its own tokens: FlashAttention's m, l and O.

    m is the highest score so far, l the sum of 2^(score - m), o the sum of values with these
    weights. Each lane group of a warp has its own tokens. Within a lane group, m and l are
    scattered: each query's m and l are in one lane, which computes its softmax. Every lane has some
    dimensions of each query's o.
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
        """Returns the indices of the queries whose m and l this lane owns."""
        return [self.lanes.item(slot) for slot in range(self.lanes.slots)]

    def rescale(self, highest: Sequence[Value]) -> None:
        """Sets m = highest, and scales l and o accordingly."""
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
        """Adds tokens: their scattered scores in base 2, and their values, each with its factor.

        A factor of None means 1.

        `counts`: for each token, the sum of weights (relative to its score) of the tokens that it
        stands for; None means 1 each.
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
        """Initializes m and l with sink logits, in one lane group so that they count once.

        once: predicate, true in exactly one lane group. The state must be empty.
        """
        k = self.k
        for m, total, score in zip(self.m, self.l, scores, strict=True):
            # minus infinity has no effect
            bounded = k.select(score < LOWEST, k.const(f32, LOWEST), score)
            m.set(k.select(once, bounded, LOWEST))
            total.set(k.select(once, k.const(f32, 1.0), 0.0))


@dataclass(frozen=True)
class Merged:
    """Merged softmax state of one query; each lane of a warp holds some dimensions of o.

    o is zero beyond head_dim.
    """

    m: Value
    l: Value  # noqa: E741, as the papers call it
    o: list[Value]

    @classmethod
    def of(
        cls, k: Builder, marks: Sequence[tuple[Value, ...]], shares: Sequence[Sequence[Value]]
    ) -> Merged:
        """Merges several states.

        `marks`: (m, l) of each state; `shares`: the lane's dimensions of each state's o.
        """
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
    """Dimensions of a thread block's queries, concatenated, that one warp merges at a time.

    Attributes:
      query, group, first: the lane's dimensions begin at `first` in the 32 dimensions number
        `group` of query `query`.
      run: dimensions per lane: 1, so that a piece is 32 dimensions of one query, or more.
      known: whether the piece exists in the thread block; None means yes.
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
        """Yields the pieces that warp `worker` of `workers` merges, of `count` queries.

        `groups`: groups of 32 dimensions per query.
        """
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
    """Warps of a thread block that share the same queries, from the view of one of its warps.

    Attributes:
      warps: per team.
      count: teams of the thread block.
    """

    k: Builder
    warps: int
    count: int = 1

    @property
    def warp(self) -> Value:
        """Number of the warp in its team."""
        return self.k.warp_id if self.count == 1 else self.k.warp_id % self.warps

    def member(self, i: int, each: int) -> Value | int:
        """Returns the thread block's index of the team's item i; each team has `each` items."""
        return i if self.count == 1 else self.k.warp_id // self.warps * each + i


class BlockState:
    """Softmax states (m, l, o) of all warps of a thread block, in shared memory.

    Attributes:
      queries: number of queries of all teams.
      groups: groups of 32 dimensions per query.
      marks: m and l, f32 (a team's warps, queries of all teams, 2).
      parts: o, f32 (a team's warps, queries of all teams, 36 per 32 dimensions). The padding of
        four avoids bank conflicts between lanes that store adjacent runs.
    """

    def __init__(
        self, k: Builder, queries: int, head_dim: int, team: Team, shift: int | None = None
    ) -> None:
        """Declares the shared memory.

        Args:
          shift: banks (a multiple of 4) from a query to the next; None means no extra padding.
        """
        self._k, self._head_dim, self._team = k, head_dim, team
        self._addresses: dict[str, Pointer] = {}  # of the team's query 0, by the run's first
        self.queries, self.groups = team.count * queries, -(-head_dim // WARP)
        pitch = self.groups * _GROUP_PITCH
        pitch += 0 if shift is None else (shift - pitch) % WARP
        sums = team.warps, self.queries
        self.marks = k.shared("warp_marks", f32, (*sums, 2))
        over = math.prod(sums) * pitch * f32.size > _MOST_STATIC
        self.parts = k.shared("warp_parts", f32, (*sums, pitch), dynamic=over)

    def address(self, query: Value, first: Value) -> Pointer:
        """Returns the address of this warp's o of a query, from dimension `first` on.

        `query`: its index in the thread block.
        """
        if self.groups > 1:
            first = first + (first // WARP) * (_GROUP_PITCH - WARP)
        return self.parts.at(self._team.warp, query).at(first)

    def team_address(self, i: int, first: Value) -> Pointer:
        """Returns `address` of query i of the team.

        All of the team's queries share one base address, which saves registers.
        """
        if first.name not in self._addresses:
            number = self.number(0)
            query = self._k.const(u32, number) if isinstance(number, int) else number
            self._addresses[first.name] = self.address(query, first)
        return self._addresses[first.name].at(i * self.parts.shape[-1])

    def share(self, piece: Piece, warp: int = 0) -> Pointer:
        """Returns the address, in the o of warp `warp`, of this lane's dimensions of a piece."""
        address = self.parts.at(warp, piece.query)
        return address.at(piece.group * _GROUP_PITCH + piece.first)

    def merged(self, run: int = 1) -> Iterator[list[tuple[Piece, Merged]]]:
        """Yields this warp's pieces, a few at a time, each merged over the team's warps.

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
        """Returns the index in the thread block of the team's query i."""
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
    """Merges each warp's lane groups, and stores the states in shared memory.

    Returns the states of the thread block's warps.
    """
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
            address = state.team_address(i, run.first)
            store_floats(address, run.values, where=all_of(run.inside, first_vector))
    return state


def _merge_lanes(softmax: OnlineSoftmax) -> None:
    """Merges the warp's lane groups; afterwards each lane group holds the full warp's state."""
    k, lanes = softmax.k, softmax.spread.lanes
    across = {"lanes": WARP // lanes, "stride": lanes}
    softmax.rescale([k.warp_max(m, **across) for m in softmax.m])
    for value in itertools.chain(softmax.l, *softmax.o):
        value.set(k.warp_sum(value, **across))
