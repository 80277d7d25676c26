"""KV cache pages: storage types, loads of a head's vector into warp lanes, quantizing stores."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..formats.unpack import e4m3 as fp8
from ..formats.unpack.packed_words import signed_byte_floats
from ..limits import HEAD_DIMS, LATENT_DIMS
from ..ptx import (
    WARP,
    Buffer,
    Builder,
    Group,
    KernelError,
    Pointer,
    Value,
    all_of,
    e4m3,
    f32,
    s8,
    u8,
    u16,
    u32,
)
from ..ptx.types import Type
from .family import Arguments, RandomValues
from .quantize_q8_1 import to_int8
from .vectors import FLOATS, Run, load_floats, pack_bytes, store_floats, two_floats

#: Storage type of each dtype of pages. `int8` pages also have an f32 scale per token and head.
PAGE_TYPES: dict[str, Type] = {**FLOATS, "int8": s8, "fp8": e4m3}
#: Names of the buffers that hold pages, scales, or the second parts of keys and values.
PAGE_BUFFERS = ("k_pages", "v_pages", "k_scales", "v_scales", "k_pages1", "v_pages1")

RowIndex = tuple[Value, Value, Value]  # page, head, slot in the page


@dataclass(frozen=True, kw_only=True)
class PageSizes(Group):
    """Number of pages of a KV cache, and tokens per page."""

    num_pages: int
    page_size: int

    def shape(self, num_kv_heads: int, head_dim: int) -> tuple[int, int, int, int]:
        """Returns the shape of the pages of keys or values."""
        return self.num_pages, num_kv_heads, self.page_size, head_dim


@dataclass(frozen=True)
class Spread:
    """Layout of a vector over a power of two of `lanes`, as runs of adjacent values.

    Attributes:
      parts: for each of a lane's runs, (first element, length, whether the run is inside the
        vector; None means yes).
    """

    lanes: int
    parts: tuple[tuple[Value, int, Value | None], ...]

    @classmethod
    def in_runs(cls, k: Builder, head_dim: int, run: int) -> Spread:
        """Returns a layout in runs of one length; the last lanes may have fewer runs or none."""
        runs = head_dim // run
        lanes = min(WARP, 1 << (runs - 1).bit_length())
        starts = range(0, runs, lanes)
        firsts = [(k.lane_id % lanes + start) * run for start in starts]
        insides = [
            f < head_dim if s + lanes > runs else None for f, s in zip(firsts, starts, strict=True)
        ]
        return cls(lanes, tuple((f, run, i) for f, i in zip(firsts, insides, strict=True)))

    @classmethod
    def evenly(cls, k: Builder, dims: Sequence[int], run: int) -> Spread:
        """Returns a layout of equal shares over a full warp, in runs of at most `run`.

        The vector is the concatenation of parts of sizes `dims`, multiples of 32, each spread
        separately.
        """
        parts: list[tuple[Value, int, Value | None]] = []
        first = 0
        for left in dims:
            while left:
                length = min(run, 1 << (left // WARP).bit_length() - 1)
                parts.append((k.lane_id * length + first, length, None))
                first, left = first + length * WARP, left - length * WARP
        return cls(WARP, tuple(parts))

    @property
    def width(self) -> int:
        """Number of values of a vector that a lane holds."""
        return sum(length for _, length, _ in self.parts)

    def front(self, width: int) -> Spread:
        """Returns the layout of only a lane's first `width` values, which must be complete runs."""
        ends = list(itertools.accumulate(length for _, length, _ in self.parts))
        return Spread(self.lanes, self.parts[: ends.index(width) + 1])

    def load(self, row: Pointer, condition: Value | None = None) -> list[Value]:
        """Loads this lane's values of the float vector at `row` as f32.

        Zeros if `condition` is false.
        """
        parts = [
            load_floats(row.at(first), length, where=all_of(inside, condition))
            for first, length, inside in self.parts
        ]
        return [value for part in parts for value in part]

    def runs(self, values: Sequence[Value]) -> list[Run]:
        """Splits this lane's values of a vector into runs, for `store_runs`."""
        left = iter(values)
        return [
            Run(first, list(itertools.islice(left, length)), inside)
            for first, length, inside in self.parts
        ]


@dataclass(frozen=True)
class Pages:
    """Keys or values of a KV cache: `rows` (num_pages, num_kv_heads, page_size, head_dim).

    `scales`: for int8 pages, f32 (num_pages, num_kv_heads, page_size): a value is its int8 times
    the scale of its page, head and slot. Otherwise None.
    """

    rows: Pointer
    scales: Pointer | None

    def load(self, spread: Spread, index: RowIndex, where: Value) -> list[Value]:
        """Loads a lane's share of a stored vector: registers of four bytes, then the scale if int8.

        `index`: (page, head, slot). A run of fewer than four bytes has its own register. Zeros if
        `where` is false.
        """
        row = self.rows.at(*index)
        loaded: list[Value] = []
        for first, length, inside in spread.parts:
            nbytes, start = length * row.type.size, row.at(first)
            words = start if row.type is f32 else start.cast({1: u8, 2: u16}.get(nbytes, u32))
            loaded += words.load_run(0, -(-nbytes // 4), where=all_of(inside, where))
        return (
            loaded if self.scales is None else [*loaded, self.scales.at(*index).load(where=where)]
        )

    def values(
        self, k: Builder, spread: Spread, loaded: Sequence[Value]
    ) -> tuple[Sequence[Value], Value | float | None]:
        """Converts registers from `load` to f32; returns (values, their factor, None means 1)."""
        if self.rows.type is f32:
            return loaded, None
        words, factor = (loaded, None) if self.scales is None else (loaded[:-1], loaded[-1])
        if self.rows.type is s8:
            values = signed_byte_floats(k, words)
        elif self.rows.type is e4m3:
            values = fp8.decode(words)
        else:
            values = [x for word in words for x in two_floats(word, self.rows.type)]
        left, per_word = iter(values), 4 // self.rows.type.size
        kept = [  # only the first ones of a register with a short run
            value
            for _, length, _ in spread.parts
            for value in list(itertools.islice(left, max(length, per_word)))[:length]
        ]
        return kept, fp8.UNIT if self.rows.type is e4m3 else factor

    def store(
        self,
        k: Builder,
        index: RowIndex,
        runs: Sequence[Run],
        *,
        lanes: int,
        where: Value | None = None,
    ) -> None:
        """Emits the quantizing store of a vector that `lanes` adjacent lanes hold.

        All of a warp's lanes must reach it. Rounds to nearest even; fp8 saturates at +-448. int8:
        the scale is the largest magnitude / 127. A NaN or an infinity makes the scale NaN or
        infinite, and so the full vector NaN.
        """
        if self.scales is not None:
            quants, amax = to_int8(k, [v for run in runs for v in run.values], lanes)
            self.scales.at(*index).store(
                0, amax * (1 / 127), where=all_of(where, k.lane_id % lanes == 0)
            )
            rest = iter(quants)
            runs = [
                Run(run.first, list(itertools.islice(rest, len(run.values))), run.inside)
                for run in runs
            ]
        store_runs(k, self.rows.at(*index), runs, where)


def declare_pages(
    buffer: Callable[[str, Type, tuple[int, ...]], Pointer],
    dtype: str,
    shape: tuple[int, int, int, int],
    *,
    latent: bool = False,
) -> list[Pages]:
    """Declares the buffers `k_pages`, `v_pages` and, for int8, `k_scales`, `v_scales`.

    Returns the `Pages` of keys, then of values; latent pages have keys only. `buffer` is `k.input`
    or `k.inout`.

    Raises KernelError if the dtype is not in PAGE_TYPES, or head_dim (the last axis) is not in
    HEAD_DIMS, or LATENT_DIMS for latent pages.
    """
    if dtype not in PAGE_TYPES:
        raise KernelError(f"dtype={dtype!r} must be one of {', '.join(PAGE_TYPES)}")
    dims, of = (LATENT_DIMS, " of latent pages") if latent else (HEAD_DIMS, "")
    if shape[-1] not in dims:
        raise KernelError(f"head_dim={shape[-1]}{of} must be one of {dims}")
    kinds = "k" if latent else "kv"
    rows = [buffer(f"{kind}_pages", PAGE_TYPES[dtype], shape) for kind in kinds]
    scales = [
        buffer(f"{kind}_scales", f32, shape[:3]) if dtype == "int8" else None for kind in kinds
    ]
    return list(map(Pages, rows, scales))


def store_runs(k: Builder, row: Pointer, runs: Sequence[Run], where: Value | None = None) -> None:
    """Emits stores of runs of f32 (for an int8 row: s32), rounded to the row's type.

    A run has one, two or a multiple of four values.
    """
    narrow = row.type.size == 1
    for run in runs:
        target, values, condition = row.at(run.first), run.values, all_of(where, run.inside)
        if narrow:
            values = [v.bits(u32) & 0xFF if row.type is s8 else fp8.encode(k, v) for v in values]
        if not narrow:
            store_floats(target, values, where=condition)
        elif len(values) % 4:
            for i, code in enumerate(values):
                target.cast(u8).store(i, code, where=condition)
        else:
            words = [pack_bytes(values[i : i + 4]) for i in range(0, len(values), 4)]
            target.cast(u32).store_run(0, words, where=condition)


def touched_slots(buffer: Buffer, arguments: Arguments) -> float:
    """Returns the fraction of a buffer that an append writes: of pages, its tokens' slots."""
    if buffer.name not in PAGE_BUFFERS:
        return 1
    return arguments["tokens"] / (arguments["num_pages"] * arguments["page_size"])


def _random_scales(
    buffer: Buffer, buffers: Mapping[str, Buffer], rng: np.random.Generator
) -> np.ndarray:
    return np.abs(rng.standard_normal(buffer.shape, np.float32)) / 100


def _random_slots(
    buffer: Buffer, buffers: Mapping[str, Buffer], rng: np.random.Generator
) -> np.ndarray:
    """Returns random slots of the pages; the first two are out of range.

    If there are more tokens than slots, as for a prompt longer than a window, only the last tokens
    have slots.
    """
    num_pages, _, page_size, _ = buffers["k_pages"].shape
    slots, tokens = num_pages * page_size, buffer.shape[0]
    mapping = np.full(tokens, -1)
    mapping[-min(slots, tokens) :] = rng.permutation(slots)[:tokens]
    if tokens > 2:
        mapping[:2] = -1, slots
    return mapping


#: Random values of a family's page and slot operands.
PAGE_OPERANDS: dict[str, RandomValues] = dict.fromkeys(("k_scales", "v_scales"), _random_scales)
SLOT_OPERANDS: dict[str, RandomValues] = {"slot_mapping": _random_slots}
