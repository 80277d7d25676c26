"""The largest value of each row and where it is: greedy sampling over a vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..devices import Target
from ..ptx import WARP, Buffer, Builder, KernelError, Value, f32, kernel, s32, u32
from .family import Case, Family, RandomValues, Rule
from .reduce import across_warps


@dataclass(frozen=True)
class ArgmaxConfig:
    """Threads of a block, and values that each of them loads before it looks at the first."""

    warps: int = 8
    unroll: int = 4


def order_key(k: Builder, x: Value) -> Value:
    """A u32 in the f32's order: -inf lowest (yet above 0), -0 equal to 0, any NaN highest."""
    bits = (x + 0.0).bits(u32)  # -0 + 0 = 0
    flipped = bits ^ ((bits.bits(s32) >> 31).bits(u32) | 0x80000000)
    return k.select(k.is_nan(x), k.const(u32, 0xFFFFFFFF), flipped)


class Search:
    """Search for a row's `count` best, in one launch or two: operands, results, a block's part.

    Each of a row's `splits` blocks leaves its best as f32 values and s32 indices (rows, splits *
    count), among which the second launch searches, `from_candidates`. `first` to `stop` (u32): the
    columns of this block.
    """

    def __init__(
        self,
        k: Builder,
        rows: int,
        columns: int,
        splits: int,
        count: int,
        from_candidates: bool,
        threads: int,
    ) -> None:
        part = -(-columns // max(splits, 1))
        if not 1 <= splits <= columns or part * (splits - 1) >= columns:
            raise KernelError(f"splits={splits} must leave each part some of columns={columns}")
        self._k, self._columns, self.part = k, columns, part
        self._x = k.input("x", f32, (rows, columns))
        self._indices = k.input("indices", s32, (rows, columns)) if from_candidates else None
        self._values = k.output("values", f32, (rows, splits * count))
        self._best = k.output("best", s32, (rows, splits * count))
        k.launch((splits, rows), threads)
        self._row, self._out = k.block_id("y"), k.block_id() * count
        self.first = k.block_id() * part
        self.stop = k.minimum(self.first + part, columns)

    def load(self, column: Value, inside: Value | None) -> Value:
        return self._x.at(self._row, column).load(where=inside)

    def store(self, i: Value | int, column: Value, found: Value | None = None) -> None:
        """Stores the block's i-th best, which is in that column of x.

        It is -inf at index `columns` where not `found`; `found` None: it is found.
        """
        k, index, value = self._k, column, self.load(column, found)
        if self._indices is not None:
            index = self._indices.at(self._row, column).load(where=found).bits(u32)
        if found is not None:
            value = k.select(found, value, float("-inf"))
            index = k.select(found, index, self._columns)
        self._values.at(self._row, self._out + i).store(0, value)
        self._best.at(self._row, self._out + i).store(0, index.bits(s32))


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
    """(max(x[r]), argmax(x[r])) for each of `splits` parts of a row; NaN is the largest.

    Ties go to the lowest index. One value of f32 and one of s32 a part: (rows, splits). A
    vocabulary takes two launches: parts over the whole device, then `from_candidates` over their
    results, whose `indices` (rows, columns) say where each value was.
    """
    threads = WARP * config.warps
    search = Search(k, rows, columns, splits, 1, from_candidates, threads)
    highest, where = k.var(u32, 0), k.var(u32, 0)
    with k.loop(search.first, search.stop, threads * config.unroll) as start:
        places = [start + k.thread_id + u * threads for u in range(config.unroll)]
        inside = [place < search.stop for place in places]
        loaded = [search.load(place, there) for place, there in zip(places, inside, strict=True)]
        for place, there, value in zip(places, inside, loaded, strict=True):
            key = k.select(there, order_key(k, value), 0)
            where.set(k.select(key > highest, place, where))  # strictly: the first of equals
            highest.set(k.maximum(highest, key))

    keys, firsts = (k.shared(name, u32, (config.warps,)) for name in ("keys", "firsts"))
    top = across_warps(k, keys, highest, k.maximum, warps=config.warps)
    candidate = k.select(highest == top, where, 0xFFFFFFFF)
    lowest = across_warps(k, firsts, candidate, k.minimum, warps=config.warps)
    with k.when(k.thread_id == 0):
        search.store(0, lowest)


def _splits_rule(device: Target, columns: int) -> int:
    """Blocks that search a row of so many values: one wave, of a thousand values each or more.

    1 means no second launch.
    """
    return equal_parts(columns, max(1024, -(-columns // device.multiprocessors)))


def equal_parts(columns: int, part: int) -> int:
    """The number of equal parts, about so large, none of them empty."""
    even = -(-columns // -(-columns // part))
    return -(-columns // even)


argmax_splits_rule: Rule[int] = Rule("argmax_splits", _splits_rule)


def search_examples(family: str, columns: int, splits: int, **arguments: int) -> tuple[Case, Case]:
    """Both launches of a search over a vocabulary."""
    found = splits * arguments.get("count", 1)
    whole = dict(rows=1, columns=columns, splits=splits, **arguments)
    merge = dict(rows=1, columns=found, from_candidates=True, **arguments)
    return (
        Case(f"{family}-{columns}", family, whole),
        Case(f"{family}-{columns}-merge", family, merge),
    )


def _random_indices(
    buffer: Buffer, buffers: Mapping[str, Buffer], rng: np.random.Generator
) -> np.ndarray:
    """Candidates of a vocabulary."""
    return rng.permutation(math.prod(buffer.shape)).reshape(buffer.shape)


SEARCH_OPERANDS: dict[str, RandomValues] = {"indices": _random_indices}
ARGMAX = Family(
    "argmax",
    argmax,
    search_examples("argmax", 128256, 128),
    rules=(argmax_splits_rule,),
    operands=SEARCH_OPERANDS,
)
