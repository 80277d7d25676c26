"""The largest value of each row and where it is: greedy sampling over a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from ..ptx import WARP, Builder, KernelError, Pointer, Value, f32, kernel, s32, u32
from .reduce import across_warps


@dataclass(frozen=True)
class ArgmaxConfig:
    """How many threads a block has, and how many values each of them loads before it looks at the first."""

    warps: int = 8
    unroll: int = 4


def order_key(k: Builder, x: Value) -> Value:
    """A u32 that orders as the f32 does: -inf lowest (yet above 0), -0 equal to 0, any NaN highest."""
    bits = (x + 0.0).bits(u32)  # -0 + 0 = 0
    flipped = bits ^ ((bits.bits(s32) >> 31).bits(u32) | 0x80000000)
    return k.select(k.instruction("setp.neu.f32", x, x), k.const(u32, 0xFFFFFFFF), flipped)


def candidates(
    k: Builder, rows: int, columns: int, splits: int, count: int, from_candidates: bool
) -> tuple[Pointer, Pointer | None, Pointer, Pointer]:
    """Operands and results of a search in two launches, (x, indices or None, best values, best indices).

    Each of a row's `splits` blocks leaves `count` candidates: f32 values and s32 indices (rows, splits * count). The
    second launch reads the first one's as `x` and `indices`.
    """
    x = k.input("x", f32, (rows, columns))
    indices = k.input("indices", s32, (rows, columns)) if from_candidates else None
    values = k.output("values", f32, (rows, splits * count))
    positions = k.output("best", s32, (rows, splits * count))
    return x, indices, values, positions


@kernel
def argmax(
    k: Builder,
    *,
    rows: int,
    columns: int,
    splits: int = 1,
    from_candidates: bool = False,
    config: ArgmaxConfig = ArgmaxConfig(),
) -> None:
    """(max(x[r]), argmax(x[r])) for each of `splits` parts of a row; ties go to the lowest index, NaN is the largest.

    One value of f32 and one of s32 a part: (rows, splits). A vocabulary takes two launches: parts over the whole
    device, then `from_candidates` over their results, whose `indices` (rows, columns) say where each value was.
    """
    part = -(-columns // splits)
    if not 1 <= splits <= columns or part * (splits - 1) >= columns:
        raise KernelError(f"splits={splits} must leave each part some of columns={columns}")
    x, indices, values, best = candidates(k, rows, columns, splits, 1, from_candidates)
    threads = WARP * config.warps
    k.launch((splits, rows), threads)
    split, row = k.block_id(), k.block_id("y")

    first = split * part
    stop = k.minimum(first + part, columns)
    highest, where = k.var(u32, 0), k.var(u32, 0)
    with k.loop(first, stop, threads * config.unroll) as start:
        places = [start + k.thread_id + u * threads for u in range(config.unroll)]
        inside = [place < stop for place in places]
        loaded = [x.at(row, place).load(where=there) for place, there in zip(places, inside, strict=True)]
        for place, there, value in zip(places, inside, loaded, strict=True):
            key = k.select(there, order_key(k, value), 0)
            where.set(k.select(key > highest, place, where))  # strictly: the first of equals
            highest.set(k.maximum(highest, key))

    keys, firsts = (k.shared(name, u32, (config.warps,)) for name in ("keys", "firsts"))
    top = across_warps(k, keys, highest, k.maximum, warps=config.warps)
    candidate = k.select(highest == top, where, 0xFFFFFFFF)
    lowest = across_warps(k, firsts, candidate, k.minimum, warps=config.warps)
    with k.when(k.thread_id == 0):
        values.at(row, split).store(0, x.at(row, lowest).load())
        index = lowest.bits(s32) if indices is None else indices.at(row, lowest).load()
        best.at(row, split).store(0, index)
