"""Router of a mixture of experts (MoE): selects each token's top experts and their weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..limits import MAX_ROUTED, MAX_ROUTED_EXPERTS
from ..ptx import WARP, Builder, KernelError, Pointer, Value, f32, kernel, s32, u32
from .activation import LOG2_E
from .argmax import order_key
from .family import Case, Family, once


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Parameters of MoE routing: how the `top` experts are selected and weighted by their logits.

    Attributes:
      gating: scores are the softmax or sigmoid of the logits.
      bias: whether a bias per expert, f32 (experts,), is added to the scores for the selection
        only.
      normalize: whether weights are divided by their sum, which is at least `least`.
      scale: factor of the weights.
    """

    top: int
    gating: Literal["softmax", "sigmoid"] = "softmax"
    bias: bool = False
    normalize: bool = True
    least: float = 0.0
    scale: float = 1.0

    def check(self, experts: int) -> None:
        """Raises KernelError unless a warp can select `top` of this many experts."""
        if not (1 <= self.top <= min(MAX_ROUTED, experts) and experts <= MAX_ROUTED_EXPERTS):
            raise KernelError(
                f"top={self.top} of experts={experts}: it must be 1 to {MAX_ROUTED}, of at most"
                f" {MAX_ROUTED_EXPERTS} experts"
            )
        if self.gating not in ("softmax", "sigmoid"):
            raise KernelError(f"gating={self.gating!r} must be softmax or sigmoid")


@dataclass(frozen=True)
class Best:
    """A token's top experts, one rank per lane of a warp.

    Attributes:
      ids, weights: u32 and f32 of the expert whose rank is the lane's index, if there is one.
      last: id (u32) of the expert with the last filled rank, in all lanes.
    """

    ids: Value
    weights: Value
    last: Value


def best_experts(
    k: Builder, routing: Routing, logits: Pointer, bias: Pointer | None, count: Value | int
) -> Best:
    """Emits the selection of a token's best `count` (1 to top) experts by one warp.

    All 32 lanes must reach it. NaN counts as infinity; among equals the lower id is first. Each
    lane holds every 32nd expert, and one instruction reduces over the lanes. Normalized weights are
    valid only if all ranks are filled.

    Args:
      logits, bias: f32 (experts,).
    """
    (experts,) = logits.shape
    starts = range(0, experts, WARP)
    ids = [k.lane_id + start if start else k.lane_id for start in starts]
    inside = [
        None if start + WARP <= experts else id < experts
        for start, id in zip(starts, ids, strict=True)
    ]
    loaded = [logits.at(id).load(where=valid) for id, valid in zip(ids, inside, strict=True)]
    scores = _scores(k, routing.gating, loaded, inside)
    keys = []
    for id, score, valid in zip(ids, scores, inside, strict=True):
        rank = score if bias is None else score + bias.at(id).load(where=valid)
        rank = k.select(k.is_nan(rank), k.const(f32, math.inf), rank)
        key = order_key(k, rank)
        keys.append(k.var(u32, key if valid is None else k.select(valid, key, 0)))
    chosen_id, chosen_score = k.var(u32, 0), k.var(f32, 0.0)
    last, total = k.var(u32, 0), k.var(f32, 0.0)
    with k.loop(0, count) as number:
        left: list[Value] = [*keys]
        best = k.redux(functools.reduce(k.maximum, left), "max")
        mine = k.const(u32, MAX_ROUTED_EXPERTS)
        for id, key in reversed(list(zip(ids, keys, strict=True))):
            mine = k.select(key == best, id, mine)
        winner = k.redux(mine, "min")
        part = k.const(u32, 0)
        for id, key, score in zip(ids, keys, scores, strict=True):
            part = k.select(id == winner, score.bits(u32), part)
            key.set(k.select(id == winner, k.const(u32, 0), key))
        score = k.redux(part, "max").bits(f32)  # reduces the bits of one lane's score and zeros
        total += score
        last.set(winner)
        chosen_id.set(k.select(k.lane_id == number, winner, chosen_id))
        chosen_score.set(k.select(k.lane_id == number, score, chosen_score))
    weight: Value = chosen_score
    if routing.normalize:
        weight = weight / k.maximum(total, routing.least, keep_nan=True)
    if routing.scale != 1:
        weight = weight * routing.scale
    return Best(chosen_id, weight, last)


class Router:
    """Declares the operands and results of MoE routing, selects experts, stores the results.

    Operands: logits f32 (rows, experts), with a bias selection_bias f32 (experts,). Results: ids
    s32 (rows, top), weights f32 (rows, top).

    With a `shared` expert each row has one more id, `experts`, with weight 1. If it is `gated` the
    weight is the sigmoid of an operand shared_logits f32 (rows, 1).
    """

    def __init__(
        self,
        k: Builder,
        routing: Routing,
        rows: int,
        experts: int,
        *,
        shared: bool = False,
        gated: bool = False,
    ) -> None:
        routing.check(experts)
        self._k, self._routing, self._experts, self._shared = k, routing, experts, shared
        count = routing.top + shared
        if count > WARP or gated > shared:
            raise KernelError(
                f"top={routing.top}, shared={shared}, gated={gated}: a row has at most {WARP} "
                "experts, and only a shared one is gated"
            )
        self._logits = k.input("logits", f32, (rows, experts))
        self._bias = (
            k.input("selection_bias", f32, (experts,), constant=True) if routing.bias else None
        )
        self._gate = k.input("shared_logits", f32, (rows, 1)) if gated else None
        self._ids = k.output("ids", s32, (rows, count))
        self._weights = k.output("weights", f32, (rows, count))

    def best(self, row: Value, count: Value | int) -> Best:
        """Emits the selection of the best `count` experts of a row."""
        logits = self._logits.at(row).reshape(self._logits.shape[1])
        return best_experts(self._k, self._routing, logits, self._bias, count)

    def store(self, row: Value, best: Best, where: Value | None = None) -> None:
        """Emits one warp's stores of a row's expert ids and weights."""
        k, lane = self._k, self._k.lane_id
        stored = lane < self._ids.shape[1]
        stored = stored if where is None else stored & where
        ids, weights = best.ids, best.weights
        if self._shared:
            weight = k.const(f32, 1.0)
            if self._gate is not None:
                (weight,) = _sigmoids(k, [self._gate.at(row).load()])
            ranked = lane < self._routing.top
            ids = k.select(ranked, ids, self._experts)
            weights = k.select(ranked, weights, weight)
        self._ids.at(row, lane).store(0, ids.bits(s32), where=stored)
        self._weights.at(row, lane).store(0, weights, where=stored)


@kernel
def route(k: Builder, *, rows: int, experts: int, routing: Routing) -> None:
    """Kernel: selects the `top` experts of each row, best first, with their weights.

    See `Routing`. There is one warp per row. Operands and results are those of `Router`.
    """
    router = Router(k, routing, rows, experts)
    k.launch((rows,), WARP)
    row = k.block_id()
    router.store(row, router.best(row, routing.top))


def _scores(
    k: Builder, gating: str, logits: Sequence[Value], inside: Sequence[Value | None]
) -> list[Value]:
    """Emits the scores of this lane's experts; unspecified where a lane has no expert."""
    if gating == "sigmoid":
        return _sigmoids(k, logits)
    lowest = k.const(f32, -math.inf)
    valid_logits = [
        x if known is None else k.select(known, x, lowest)
        for x, known in zip(logits, inside, strict=True)
    ]
    larger = functools.partial(k.maximum, keep_nan=True)
    highest = k.warp_reduce(functools.reduce(larger, valid_logits), larger)
    powers = [k.exp2((x - highest) * LOG2_E) for x in valid_logits]
    total = k.warp_sum(functools.reduce(lambda a, b: a + b, powers))
    return [power / total for power in powers]


def _sigmoids(k: Builder, logits: Sequence[Value]) -> list[Value]:
    one = k.const(f32, 1.0)
    return [one / (k.exp2(x * -LOG2_E) + 1.0) for x in logits]


ROUTE = Family(
    route,
    (
        Case.of(route, "128-8", rows=1, experts=128, routing=Routing(top=8)),
        Case.of(
            route,
            "sigmoid-256-8",
            rows=8,
            experts=256,
            routing=Routing(top=8, gating="sigmoid", bias=True, scale=2.5),
        ),
    ),
    passes=once,
)
