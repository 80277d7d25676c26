"""Online softmax (Milakov and Gimelshein 2018): partial results in lanes, warps and splits, and how
they merge.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..ptx import WARP, Builder, Dealt, Pointer, Value, Var, all_of, f32
from .activation import exp2
from .pages import Spread
from .vectors import store_floats

LOWEST = -3.0e38  # below every score; finite, so that no difference of two of them is NaN


class State:
    """Some queries in a lane: running maximum and sum of the scores' powers of 2, and the values
    weighted by these.

    A warp's groups of lanes have tokens of their own. In a group `highest` and `total` are dealt,
    so that a softmax is one lane's work for each query; of every query's `values` a lane has its
    share.
    """

    def __init__(self, k: Builder, queries: int, spread: Spread) -> None:
        self.dealt = Dealt(k, queries, spread.lanes)
        self.highest: list[Var] = [k.var(f32, LOWEST) for _ in range(self.dealt.slots)]
        self.total: list[Var] = [k.var(f32, 0.0) for _ in range(self.dealt.slots)]
        self.values: list[list[Var]] = [
            [k.var(f32, 0.0) for _ in range(spread.width)] for _ in range(queries)
        ]

    def rescale(self, k: Builder, highest: Sequence[Value]) -> None:
        factors = [exp2(k, mine - new) for mine, new in zip(self.highest, highest, strict=True)]
        for mine, total, new, factor in zip(
            self.highest, self.total, highest, factors, strict=True
        ):
            mine.set(new)
            total *= factor
        for values, factor in zip(self.values, self.dealt.all(factors), strict=True):
            for value in values:
                value *= factor

    def add(
        self,
        k: Builder,
        scores: Sequence[Sequence[Value]],
        seen: Sequence[Value],
        values: Sequence[tuple[Sequence[Value], Value | float | None]],
        counts: Sequence[Value] | None = None,
    ) -> None:
        """Adds tokens by their scores in base 2, dealt. Beside a token's values stands their
        factor; None: 1.

        `counts`: each stands for tokens already added up to this sum of weights, relative to its
        score.
        """
        highest: list[Value] = [*self.highest]
        for token, ok in zip(scores, seen, strict=True):
            highest = [
                k.maximum(mine, k.select(ok, s, LOWEST))
                for mine, s in zip(highest, token, strict=True)
            ]
        self.rescale(k, highest)
        for i, (token, ok) in enumerate(zip(scores, seen, strict=True)):
            weights = [
                k.select(ok, exp2(k, s - mine), 0.0)
                for s, mine in zip(token, self.highest, strict=True)
            ]
            for total, weight in zip(self.total, weights, strict=True):
                k.accumulate(total, weight, 1.0 if counts is None else counts[i])
            vector, factor = values[i]
            weighted = self.dealt.all(
                weights if factor is None else [weight * factor for weight in weights]
            )
            for mine, weight in zip(self.values, weighted, strict=True):
                for total, value in zip(mine, vector, strict=True):
                    k.accumulate(total, weight, value)

    def add_sinks(self, k: Builder, scores: Sequence[Value], once: Value) -> None:
        """Dealt logits without a value, in an empty state; in one lane group of all, where `once`
        holds.
        """
        for highest, total, score in zip(self.highest, self.total, scores, strict=True):
            bounded = k.select(
                score < LOWEST, k.const(f32, LOWEST), score
            )  # minus infinity counts for nothing
            highest.set(k.select(once, bounded, LOWEST))
            total.set(k.select(once, k.const(f32, 1.0), 0.0))


@dataclass(frozen=True)
class Merged:
    """A query's state over the whole block, in the lanes of one warp: lane l holds dimensions l, l
    + 32, ...

    `shares[i]` is the weighted sum of dimension l + 32 i, and zero beyond head_dim.
    """

    highest: Value
    total: Value
    shares: list[Value]

    def normalized(self, k: Builder) -> list[Value]:
        """The shares over the sum; zeros where no token was seen: the sum is 0, and so is every
        share.
        """
        scale = k.select(self.total == 0.0, k.const(f32, 0.0), k.const(f32, 1.0) / self.total)
        return [share * scale for share in self.shares]


def dot(k: Builder, a: Sequence[Value], b: Sequence[Value]) -> Value:
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = k.fma(x, y, total)
    return total


def merge_block(
    k: Builder,
    state: State,
    spread: Spread,
    head_dim: int,
    warps: int,
    write: Callable[[int, Merged], None],
) -> None:
    """Merges every query over the block's lanes and warps; `write(query, merged)` then runs in one
    warp each.

    All threads must come here. Warps meet in shared memory, (queries, warps, head_dim).
    """
    if spread.lanes < WARP:
        _merge_lanes(k, state, spread.lanes)
    marks = k.shared("warp_marks", f32, (len(state.values), warps, 2))
    parts = k.shared("warp_parts", f32, (len(state.values), warps, head_dim))
    first_vector = k.lane_id < spread.lanes  # the other lanes hold the same
    for i, values in enumerate(state.values):
        slot = i % state.dealt.slots
        mark = state.highest[slot], state.total[slot]
        marks.at(i, k.warp_id).store(0, mark, where=k.lane_id == state.dealt.lane(i))
        row = parts.at(i, k.warp_id)
        for run in spread.runs(values):
            store_floats(row.at(run.first), run.values, where=all_of(run.inside, first_vector))
    k.barrier()
    for i in range(len(state.values)):
        with k.when(k.warp_id == i % warps):
            write(i, _merge_warps(k, marks, parts, i))


def _merge_lanes(k: Builder, state: State, lanes: int) -> None:
    """Merges the warp's groups of lanes; afterwards each holds the whole warp's state."""
    apart = {"lanes": WARP // lanes, "stride": lanes}
    state.rescale(k, [k.warp_max(highest, **apart) for highest in state.highest])
    for value in itertools.chain(state.total, *state.values):
        value.set(k.warp_sum(value, **apart))


def _merge_warps(k: Builder, marks: Pointer, parts: Pointer, query: int) -> Merged:
    _, warps, head_dim = parts.shape
    each = [marks.at(query, w).load(vector=2) for w in range(warps)]
    highest = functools.reduce(k.maximum, [mark for mark, _ in each])
    factors = [exp2(k, mark - highest) for mark, _ in each]
    shares = []
    for first in range(0, head_dim, WARP):
        inside = k.lane_id < head_dim - first if first + WARP > head_dim else None
        loaded = [parts.at(query, w, k.lane_id).load(first, where=inside) for w in range(warps)]
        shares.append(dot(k, factors, loaded))
    return Merged(highest, dot(k, factors, [total for _, total in each]), shares)
