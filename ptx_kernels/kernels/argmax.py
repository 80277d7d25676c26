"""Argmax kernel: the largest value of each row and its index, for greedy sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..devices import Target
from ..ptx import WARP, Buffer, Builder, Kernel, KernelError, Value, f32, kernel, s32, u32
from .family import Case, Family, RandomValues, Rule
from .reduce import across_warps


@dataclass(frozen=True)
class ArgmaxConfig:
    """Warps of a thread block, and values per thread loaded before the first is used."""

    warps: int = 8
    unroll: int = 4


def order_key(k: Builder, x: Value) -> Value:
    """Emits a u32 key for an f32; keys are ordered like the floats.

    -inf is lowest (but above 0), -0 equals 0, and any NaN is highest.
    """
    bits = (x + 0.0).bits(u32)  # -0 + 0 = 0
    flipped = bits ^ ((bits.bits(s32) >> 31).bits(u32) | 0x80000000)
    return k.select(k.is_nan(x), k.const(u32, 0xFFFFFFFF), flipped)


class Search:
    """Operands, results and block partition of a search for the `count` best values of each row.

    Each of a row's `splits` thread blocks searches its own columns and writes its best as f32
    values and s32 indices (rows, splits * count). With several, a further launch searches these
    candidates (`from_candidates`).

    Attributes:
      first, stop: the columns of this thread block (u32).
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
        """Emits the stores of the thread block's i-th best value, found in column `column` of x.

        If `found` is false, it stores -inf and index `columns`; `found` None means true.
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
    """Kernel: (max, argmax) of each of `splits` equal parts of every row x[r]; NaN is the largest.

    Ties go to the lowest index. The results are f32 values and s32 indices (rows, splits). A
    vocabulary takes two launches: one over parts on the full device, then one `from_candidates`
    over their results, whose `indices` (rows, columns) are the original positions.
    """
    threads = WARP * config.warps
    search = Search(k, rows, columns, splits, 1, from_candidates, threads)
    highest, where = k.var(u32, 0), k.var(u32, 0)
    with k.loop(search.first, search.stop, threads * config.unroll) as start:
        indices = [start + k.thread_id + u * threads for u in range(config.unroll)]
        inside = [index < search.stop for index in indices]
        loaded = [search.load(index, valid) for index, valid in zip(indices, inside, strict=True)]
        for index, valid, value in zip(indices, inside, loaded, strict=True):
            key = k.select(valid, order_key(k, value), 0)
            where.set(k.select(key > highest, index, where))  # the first of equals wins
            highest.set(k.maximum(highest, key))

    keys, firsts = (k.shared(name, u32, (config.warps,)) for name in ("keys", "firsts"))
    top = across_warps(k, keys, highest, k.maximum, warps=config.warps)
    candidate = k.select(highest == top, where, 0xFFFFFFFF)
    lowest = across_warps(k, firsts, candidate, k.minimum, warps=config.warps)
    with k.when(k.thread_id == 0):
        search.store(0, lowest)


def _splits_rule(device: Target, columns: int) -> int:
    """Returns the number of thread blocks that search a row: one wave, at least 1024 values each.

    With 1 thread block there is no second launch.
    """
    return equal_parts(columns, max(1024, -(-columns // device.multiprocessors)))


def equal_parts(columns: int, part: int) -> int:
    """Returns the number of equal, nonempty parts of `columns` with about `part` columns each."""
    even = -(-columns // -(-columns // part))
    return -(-columns // even)


argmax_splits_rule: Rule[int] = Rule("argmax_splits", _splits_rule)


def search_examples(
    build: Callable[..., Kernel], columns: int, splits: int, **arguments: int
) -> tuple[Case, Case]:
    """Returns example cases of both launches of a search over a vocabulary."""
    found = splits * arguments.get("count", 1)
    whole = dict(rows=1, columns=columns, splits=splits, **arguments)
    merge = dict(rows=1, columns=found, from_candidates=True, **arguments)
    return (
        Case.of(build, f"{columns}", **whole),
        Case.of(build, f"{columns}-merge", **merge),
    )


def _random_indices(
    buffer: Buffer, buffers: Mapping[str, Buffer], rng: np.random.Generator
) -> np.ndarray:
    """Returns random token ids (s32) for the second launch's `indices`."""
    return rng.permutation(math.prod(buffer.shape)).reshape(buffer.shape)


SEARCH_OPERANDS: dict[str, RandomValues] = {"indices": _random_indices}
ARGMAX = Family(
    argmax,
    search_examples(argmax, 128256, 128),
    rules=(argmax_splits_rule,),
    operands=SEARCH_OPERANDS,
)
