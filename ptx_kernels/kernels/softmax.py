"""Online softmax (Milakov and Gimelshein 2018): partial results in lanes, warps and splits, and how they merge."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..ptx import WARP, Builder, Pointer, Value, Var, all_of, f32
from .activation import exp2
from .pages import Spread
from .vectors import store_floats

LOWEST = -3.0e38  # below every score; finite, so that no difference of two of them is NaN


class State:
    """One query in a lane: running maximum and sum of the scores' powers of 2, and the values weighted by these."""

    def __init__(self, k: Builder, width: int) -> None:
        self.highest: Var = k.var(f32, LOWEST)
        self.total: Var = k.var(f32, 0.0)
        self.values: list[Var] = [k.var(f32, 0.0) for _ in range(width)]

    def rescale(self, k: Builder, highest: Value) -> None:
        factor = exp2(k, self.highest - highest)
        self.highest.set(highest)
        self.total *= factor
        for value in self.values:
            value *= factor

    def add(
        self,
        k: Builder,
        scores: Sequence[Value],
        seen: Sequence[Value],
        values: Sequence[tuple[Sequence[Value], Value | float | None]],
        counts: Sequence[Value] | None = None,
    ) -> None:
        """Adds tokens by their scores in base 2. Beside a token's values stands their factor; None: 1.

        `counts`: each stands for tokens already added up to this sum of weights, relative to its score.
        """
        highest: Value = self.highest
        for score, ok in zip(scores, seen, strict=True):
            highest = k.maximum(highest, k.select(ok, score, LOWEST))
        self.rescale(k, highest)
        for i, (score, ok) in enumerate(zip(scores, seen, strict=True)):
            weight = k.select(ok, exp2(k, score - self.highest), 0.0)
            k.accumulate(self.total, weight, 1.0 if counts is None else counts[i])
            vector, factor = values[i]
            weighted = weight if factor is None else weight * factor
            for mine, value in zip(self.values, vector, strict=True):
                k.accumulate(mine, weighted, value)

    def add_sink(self, k: Builder, score: Value, once: Value) -> None:
        """A logit without a value, in an empty state; in one lane group of all, where `once` holds."""
        bounded = k.select(score < LOWEST, k.const(f32, LOWEST), score)  # minus infinity counts for nothing
        self.highest.set(k.select(once, bounded, LOWEST))
        self.total.set(k.select(once, k.const(f32, 1.0), 0.0))


@dataclass(frozen=True)
class Merged:
    """A query's state over the whole block, in the lanes of one warp: lane l holds dimensions l, l + 32, ...

    `shares[i]` is the weighted sum of dimension l + 32 i, and zero beyond head_dim.
    """

    highest: Value
    total: Value
    shares: list[Value]

    def normalized(self, k: Builder) -> list[Value]:
        """The shares over the sum; zeros where no token was seen: the sum is 0, and so is every share."""
        scale = k.select(self.total == 0.0, k.const(f32, 0.0), k.const(f32, 1.0) / self.total)
        return [share * scale for share in self.shares]


def dot(k: Builder, a: Sequence[Value], b: Sequence[Value]) -> Value:
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = k.fma(x, y, total)
    return total


def merge_block(
    k: Builder, states: list[State], spread: Spread, head_dim: int, warps: int, write: Callable[[int, Merged], None]
) -> None:
    """Merges every query's states over the block's lanes and warps; `write(query, merged)` then runs in one warp each.

    All threads must come here. Warps meet in shared memory, (queries, warps, head_dim).
    """
    for state in states if spread.lanes < WARP else ():
        _merge_lanes(k, state, spread.lanes)
    marks = k.shared("warp_marks", f32, (len(states), warps, 2))
    parts = k.shared("warp_parts", f32, (len(states), warps, head_dim))
    first_vector = k.lane_id < spread.lanes  # the other lanes hold the same
    for i, state in enumerate(states):
        marks.at(i, k.warp_id).store(0, (state.highest, state.total), where=k.lane_id == 0)
        row = parts.at(i, k.warp_id)
        for run in spread.runs(state.values):
            store_floats(row.at(run.first), run.values, where=all_of(run.inside, first_vector))
    k.barrier()
    for i in range(len(states)):
        with k.when(k.warp_id == i % warps):
            write(i, _merge_warps(k, marks, parts, i))


def _merge_lanes(k: Builder, state: State, lanes: int) -> None:
    """Merges the warp's groups of lanes; afterwards each holds the whole warp's state."""
    apart = {"lanes": WARP // lanes, "stride": lanes}
    state.rescale(k, k.warp_max(state.highest, **apart))
    state.total.set(k.warp_sum(state.total, **apart))
    for value in state.values:
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
