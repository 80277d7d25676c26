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
    """Numbers of experts in a stack (MoE), and of those that each token selects; 0 if dense.

    `shared`: whether each token has one more expert, with number `experts` and matrices that are
    not in the stacks (see `input_planes`).
    """

    experts: int = 0
    top: int = 0
    shared: bool = False


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


def check_shared(biases: bool) -> None:
    """Raises KernelError for biases, which only experts in a stack have."""
    if biases:
        raise KernelError("a shared expert has no bias or scale: biases=scales=False")


def chosen(
    k: Builder, m: int, moe: Experts, routing: Routing | None = None, *, gated: bool = False
) -> Choice | None:
    """Returns the thread block's `Choice`: operand `ids`, s32 (m, top), at its y index.

    Returns None for a dense matrix. An id outside 0 to experts - 1 is not `named`. With a `routing`
    the thread block selects its expert from router logits (see `_routed`), which a shared expert
    needs; `gated` as in `Router`.
    """
    experts, top = moe.experts, moe.top
    if (moe.shared or gated) and routing is None:
        raise KernelError("shared=True and gated=True need a routing, which numbers the experts")
    if not experts and not top:
        return None
    check_choices(experts, top)
    row = k.block_id("y")
    if routing is not None:
        return _routed(k, m, moe, routing, row, gated)
    id = k.input("ids", s32, (m, top)).at(0, row).load().bits(u32)
    named = id < experts
    expert = k.select(named, id, 0)
    return Choice(
        token=row // top, row=row, experts=experts, expert=expert, count=m * top, named=named
    )


def _routed(k: Builder, m: int, moe: Experts, routing: Routing, row: Value, gated: bool) -> Choice:
    """Emits the selection of the thread block's expert from its token's router logits.

    Declares a `Router`'s operands and results. Every warp searches redundantly, which takes less
    time than waiting for another, and only up to the thread block's rank; not at all for a shared
    expert, which is last. A token's first thread block finds all ranks, and stores them.
    """
    experts, top, shared = moe.experts, moe.top, moe.shared
    if routing.top != top:
        raise KernelError(f"top={top} must be the routing's, {routing.top}")
    router = Router(k, routing, m, experts, shared=shared, gated=gated)
    each = top + shared
    token, rank = row // each, row % each
    first = (k.block_id() == 0) & (rank == 0)
    searched = rank + 1
    if shared:
        searched = k.select(rank == top, k.const(u32, 0), searched)
    best = router.best(token, k.select(first, k.const(u32, top), searched))
    router.store(token, best, where=first & (k.warp_id == 0))
    expert = k.select(first, k.shuffle(best.ids, 0), best.last)
    if shared:
        expert = k.select(rank == top, k.const(u32, experts), expert)
    return Choice(
        token=token,
        row=row,
        experts=experts,
        expert=expert,
        shared=shared,
        count=m * each,
        named=None,
    )


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
