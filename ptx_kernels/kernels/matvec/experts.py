"""Experts of an MoE: matrices of a stack, selected by ids in device memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from ...ptx import Builder, KernelError, Value, s32, u32
from ..route import Router, Routing
from .epilogue import Epilogue
from .rows import BlockRow


@dataclass(frozen=True, kw_only=True)
class Choice(BlockRow):
    """A token's choice of an expert, one of `count` choices of all tokens.

    `named`: whether its id is in range; an id out of range is replaced by 0. None: it is in range.
    """

    count: int
    named: Value | None


def check_choices(experts: int, top: int) -> None:
    """Raises KernelError unless each token can choose `top` of this many experts."""
    if experts < 1 or top < 1:
        raise KernelError(f"experts={experts} and top={top} must both be at least 1, or both 0")


def chosen(
    k: Builder, m: int, experts: int, top: int, routing: Routing | None = None
) -> Choice | None:
    """Returns the block's choice by its y index: a value of the operand `ids`, s32 (m, top).

    Returns None if `experts` and `top` are 0. An id outside 0 to experts - 1 is not `named`. With a
    `routing` the block selects its expert itself (see `_routed`).
    """
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
    """Selects the block's expert by its token's logits; has a `Router`'s operands and results.

    Every warp searches itself, which takes less time than waiting for another, and only up to the
    block's rank. A token's first block finds all ranks, and stores them.
    """
    if routing.top != top:
        raise KernelError(f"top={top} must be the routing's, {routing.top}")
    router = Router(k, routing, m, experts)
    token, place = row // top, row % top
    first = (k.block_id() == 0) & (place == 0)
    best = router.best(token, k.select(first, k.const(u32, top), place + 1))
    router.store(token, best, where=first & (k.warp_id == 0))
    expert = k.select(first, k.shuffle(best.ids, 0), best.last)
    return Choice(token=token, row=row, experts=experts, expert=expert, count=m * top, named=None)


@contextlib.contextmanager
def where_named(
    k: Builder, choice: Choice | None, epilogue: Epilogue, blocks: int
) -> Iterator[None]:
    """Runs the body in blocks whose choice names an expert; other results become zeros.

    `blocks`: along x. All threads of a block take the same branch, so the body may contain
    barriers.
    """
    if choice is None or choice.named is None:
        yield
        return
    with k.when(choice.named) as branch:
        yield
    with branch.otherwise():
        epilogue.clear(blocks)
