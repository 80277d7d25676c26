"""Reductions over the warps of a thread block."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..ptx import Builder, Pointer, Value


def across_warps(
    k: Builder,
    parts: Pointer,
    value: Value,
    combine: Callable[[Value, Value], Value],
    *,
    warps: int,
) -> Value:
    """Emits the reduction of one value per thread over a thread block; all threads get the result.

    `parts`: shared memory of `warps` elements, which nothing else may access before the next
    barrier. It uses one barrier, so all threads must reach it. Warps are combined in order.
    """
    value = k.warp_reduce(value, combine)
    if warps == 1:
        return value
    parts.at(k.warp_id).store(0, value, where=k.lane_id == 0)
    k.barrier()
    return functools.reduce(combine, parts.load_run(0, warps))
