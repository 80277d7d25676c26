"""The router of a mixture of experts: each token's best experts, and their weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal

from ..limits import MAX_ROUTED, MAX_ROUTED_EXPERTS
from ..ptx import WARP, Builder, KernelError, Value, f32, kernel, s32, u32
from .activation import LOG2_E
from .argmax import order_key
from .family import Case, Family, once


@kernel
def route(
    k: Builder,
    *,
    rows: int,
    experts: int,
    top: int,
    gating: Literal["softmax", "sigmoid"] = "softmax",
    bias: bool = False,
    normalize: bool = True,
    least: float = 0.0,
    scale: float = 1.0,
) -> None:
    """The `top` experts of each row by score + bias, best first, and scale * score of each.

    Scores are softmax or sigmoid of the logits; with `normalize` they are divided by their sum, at
    least `least`. NaN counts as infinity; of equals the lower id comes first. A warp has a row, and
    its lanes every 32nd expert.

    Operands: logits f32 (rows, experts), bias f32 (experts,). Results: ids s32 (rows, top), weights
    f32 (rows, top).
    """
    if not (1 <= top <= min(MAX_ROUTED, experts) and experts <= MAX_ROUTED_EXPERTS):
        raise KernelError(
            f"top={top} of experts={experts}: it must be 1 to {MAX_ROUTED}, of at most"
            f" {MAX_ROUTED_EXPERTS} experts"
        )
    logits = k.input("logits", f32, (rows, experts))
    biases = k.input("bias", f32, (experts,), constant=True) if bias else None
    ids, weights = k.output("ids", s32, (rows, top)), k.output("weights", f32, (rows, top))
    k.launch((rows,), WARP)
    row = k.block_id()
    starts = range(0, experts, WARP)
    own = [k.lane_id + start if start else k.lane_id for start in starts]
    inside = [
        None if start + WARP <= experts else id < experts
        for start, id in zip(starts, own, strict=True)
    ]
    loaded = [logits.at(row, id).load(where=there) for id, there in zip(own, inside, strict=True)]
    scores = _scores(k, gating, loaded, inside)
    keys = []
    for id, score, there in zip(own, scores, inside, strict=True):
        rank = score if biases is None else score + biases.at(id).load(where=there)
        rank = k.select(k.is_nan(rank), k.const(f32, math.inf), rank)
        key = order_key(k, rank)
        keys.append(k.var(u32, key if there is None else k.select(there, key, 0)))
    chosen_id, chosen_score = k.var(u32, 0), k.var(f32, 0.0)
    total = k.var(f32, 0.0)
    with k.loop(0, top) as place:
        left: list[Value] = [*keys]
        best = k.warp_reduce(functools.reduce(k.maximum, left), k.maximum)
        mine = k.const(u32, MAX_ROUTED_EXPERTS)
        for id, key in reversed(list(zip(own, keys, strict=True))):
            mine = k.select(key == best, id, mine)
        winner = k.warp_reduce(mine, k.minimum)
        part = k.const(f32, 0.0)
        for id, key, score in zip(own, keys, scores, strict=True):
            part = k.select(id == winner, score, part)
            key.set(k.select(id == winner, k.const(u32, 0), key))
        score = k.warp_sum(part)
        total += score
        chosen_id.set(k.select(k.lane_id == place, winner, chosen_id))
        chosen_score.set(k.select(k.lane_id == place, score, chosen_score))
    weight: Value = chosen_score
    if normalize:
        weight = weight / k.maximum(total, least, keep_nan=True)
    if scale != 1:
        weight = weight * scale
    stored = k.lane_id < top
    ids.at(row, k.lane_id).store(0, chosen_id.bits(s32), where=stored)
    weights.at(row, k.lane_id).store(0, weight, where=stored)


def _scores(
    k: Builder, gating: str, logits: Sequence[Value], inside: Sequence[Value | None]
) -> list[Value]:
    """A lane's scores; whatever where there is no expert."""
    if gating == "sigmoid":
        one = k.const(f32, 1.0)
        return [one / (k.exp2(x * -LOG2_E) + 1.0) for x in logits]
    if gating != "softmax":
        raise KernelError(f"gating={gating!r} must be softmax or sigmoid")
    lowest = k.const(f32, -math.inf)
    there = [
        x if known is None else k.select(known, x, lowest)
        for x, known in zip(logits, inside, strict=True)
    ]
    larger = functools.partial(k.maximum, keep_nan=True)
    highest = k.warp_reduce(functools.reduce(larger, there), larger)
    powers = [k.exp2((x - highest) * LOG2_E) for x in there]
    total = k.warp_sum(functools.reduce(lambda a, b: a + b, powers))
    return [power / total for power in powers]


ROUTE = Family(
    "route",
    route,
    (
        Case("route-128-8", "route", dict(rows=1, experts=128, top=8)),
        Case(
            "route-sigmoid-256-8",
            "route",
            dict(rows=8, experts=256, top=8, gating="sigmoid", bias=True, scale=2.5),
        ),
    ),
    passes=once,
)
