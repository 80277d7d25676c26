"""Selects a thread block's expert matrix (MoE), by ids in device memory or by router logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from ...ptx import Builder, Group, KernelError, Value, s32, u32
from ..route import Router, Routing
from .epilogue import Epilogue
from .rows import BlockRow


@dataclass(frozen=True, kw_only=True)
class Experts(Group):
    """Numbers of experts in a stack (MoE), and of those that each token selects; 0 if dense."""

    experts: int = 0
    top: int = 0


@dataclass(frozen=True, kw_only=True)
class Choice(BlockRow):
    """The (token, selected expert) pair that a thread block computes, one of `count` in total.

    `named`: whether the expert id is in range; an id out of range is replaced by 0. None means that
    it is in range.
    """

    count: int
    named: Value | None


def check_choices(experts: int, top: int) -> None:
    """Raises KernelError unless `experts` and `top` are both at least 1."""
    if experts < 1 or top < 1:
        raise KernelError(f"experts={experts} and top={top} must both be at least 1, or both 0")


def chosen(k: Builder, m: int, moe: Experts, routing: Routing | None = None) -> Choice | None:
    """Returns the thread block's `Choice`: operand `ids`, s32 (m, top), at its y index.

    Returns None for a dense matrix. An id outside 0 to experts - 1 is not `named`. With a `routing`
    the thread block selects its expert from router logits (see `_routed`).
    """
    experts, top = moe.experts, moe.top
    if not experts and not top:
        return None
    check_choices(experts, top)
    row = k.block_id("y")
    if routing is not None:
        return _routed(k, m, experts, top, routing, row)
    id = k.input("ids", s32, (m, top)).at(0, row).load().bits(u32)
    named = id < experts
    expert = k.select(named, id, 0)
    return Choice(
        token=row // top, row=row, experts=experts, expert=expert, count=m * top, named=named
    )


def _routed(k: Builder, m: int, experts: int, top: int, routing: Routing, row: Value) -> Choice:
    """Emits the selection of the thread block's expert from its token's router logits.

    Declares a `Router`'s operands and results. Every warp searches redundantly, which takes less
    time than waiting for another, and only up to the thread block's rank. A token's first thread
    block finds all ranks, and stores them.
    """
    if routing.top != top:
        raise KernelError(f"top={top} must be the routing's, {routing.top}")
    router = Router(k, routing, m, experts)
    token, rank = row // top, row % top
    first = (k.block_id() == 0) & (rank == 0)
    best = router.best(token, k.select(first, k.const(u32, top), rank + 1))
    router.store(token, best, where=first & (k.warp_id == 0))
    expert = k.select(first, k.shuffle(best.ids, 0), best.last)
    return Choice(token=token, row=row, experts=experts, expert=expert, count=m * top, named=None)


@contextlib.contextmanager
def where_named(
    k: Builder, choice: Choice | None, epilogue: Epilogue, blocks: int
) -> Iterator[None]:
    """Runs the body in thread blocks whose expert id is in range; the others store zeros.

    `blocks`: thread blocks along x. All threads of a thread block take the same branch, so the body
    may contain barriers.
    """
    if choice is None or choice.named is None:
        yield
        return
    with k.when(choice.named) as branch:
        yield
    with branch.otherwise():
        epilogue.clear(blocks)
