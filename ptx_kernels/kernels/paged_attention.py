"""Attention of one query token per sequence over keys and values in pages."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..ptx import WARP, Builder, KernelError, Pointer, Value, Var, f32, kernel, s32, u32
from .vectors import float_type, load_floats, store_floats

HEAD_DIMS = tuple(range(32, 257, 32))
_LOG2_E = math.log2(math.e)
_LOWEST = -3.0e38  # below every score; finite, so that no difference of two of them is NaN


@dataclass(frozen=True)
class PagedAttentionConfig:
    """How the attention of one token spreads over the GPU.

    Attributes:
      warps: per block; they share one sequence and group of query heads, and split its tokens.
      queries: query heads of a group that one block holds in registers; K and V are read once for all of them.
      unroll: tokens of each lane in flight.
      resident_blocks: blocks that a multiprocessor's registers must have room for.
    """

    warps: int = 4
    queries: int = 8
    unroll: int = 2
    resident_blocks: int = 2


class _Spread:
    """How one token's head_dim values lie over lanes: 16 bytes each, `lanes` lanes a token.

    A lane holds `pieces` runs of `run` values (two runs for the widest f32 heads). Where head_dim does not fill a
    power of two of lanes, the last ones hold nothing.
    """

    def __init__(self, k: Builder, head_dim: int, run: int) -> None:
        loads = head_dim // run
        self.run = run
        self.lanes = min(WARP, 1 << (loads - 1).bit_length())
        self.pieces = -(-loads // self.lanes)
        lane = k.lane_id % self.lanes
        self.dims = [(lane + piece * self.lanes) * run for piece in range(self.pieces)]  # first value of each run
        self._holds = [
            dim < head_dim if (piece + 1) * self.lanes > loads else None for piece, dim in enumerate(self.dims)
        ]

    @property
    def width(self) -> int:
        """Values of a token that a lane holds."""
        return self.pieces * self.run

    def where(self, piece: int, condition: Value | None = None) -> Value | None:
        """Whether this lane holds values of that piece, and the condition holds; None: always."""
        held = self._holds[piece]
        if held is None or condition is None:
            return held if condition is None else condition
        return held & condition

    def load(self, row: Pointer, condition: Value | None = None) -> list[Value]:
        """This lane's values of the head_dim floats at `row`, as f32; zeros where the condition fails."""
        return [
            value
            for piece, dim in enumerate(self.dims)
            for value in load_floats(row.at(dim), self.run, where=self.where(piece, condition))
        ]


class _State:
    """Online softmax of one query in a lane: running maximum and sum in base 2, and the weighted values."""

    def __init__(self, k: Builder, width: int) -> None:
        self.highest: Var = k.var(f32, _LOWEST)
        self.total: Var = k.var(f32, 0.0)
        self.values: list[Var] = [k.var(f32, 0.0) for _ in range(width)]

    def rescale(self, k: Builder, highest: Value) -> None:
        factor = _exp2(k, self.highest - highest)
        self.highest.set(highest)
        self.total *= factor
        for value in self.values:
            value *= factor

    def add(self, k: Builder, score: Value, seen: Value, values: list[Value]) -> None:
        weight = k.select(seen, _exp2(k, score - self.highest), 0.0)
        self.total += weight
        for mine, value in zip(self.values, values, strict=True):
            k.accumulate(mine, weight, value)


def _exp2(k: Builder, x: Value) -> Value:
    return k.instruction("ex2.approx.f32", x)


@kernel
def paged_attention(
    k: Builder,
    *,
    batch: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_pages: int,
    page_size: int,
    pages_per_sequence: int,
    scale: float,
    dtype: str = "f32",
    config: PagedAttentionConfig = PagedAttentionConfig(),
) -> None:
    """out[b, h] = softmax(scale * q[b, h] . K) V over the first context_lens[b] tokens of sequence b.

    A block has one sequence and up to `queries` query heads that share a KV head. A token's K is spread over
    `lanes` lanes, 16 bytes each, so a warp holds WARP / lanes tokens at once; every group of lanes runs its own
    online softmax (Milakov and Gimelshein 2018), merged over groups by shuffles and over warps in shared memory.
    Tokens beyond the context, or whose page id is outside the pages, are not read. No token: zeros.
    """
    storage = float_type(dtype)
    group = num_heads // num_kv_heads
    queries = min(config.queries, group)
    if head_dim not in HEAD_DIMS or num_heads % num_kv_heads:
        raise KernelError(f"head_dim={head_dim} must be one of {HEAD_DIMS}, num_heads a multiple of num_kv_heads")
    splits = -(-group // queries)

    q = k.input("q", f32, (batch, num_heads, head_dim))
    k_pages = k.input("k_pages", storage, (num_pages, num_kv_heads, page_size, head_dim))
    v_pages = k.input("v_pages", storage, (num_pages, num_kv_heads, page_size, head_dim))
    block_tables = k.input("block_tables", s32, (batch, pages_per_sequence))
    context_lens = k.input("context_lens", s32, (batch,))
    out = k.output("out", f32, (batch, num_heads, head_dim))
    k.launch((num_kv_heads * splits, batch), WARP * config.warps, resident_blocks=config.resident_blocks)
    spread = _Spread(k, head_dim, 16 // storage.size)
    lanes = spread.lanes
    streams = WARP // lanes * config.warps  # tokens that the block holds at once

    sequence = k.block_id("y")
    kv_head, first = k.block_id() // splits, (k.block_id() % splits) * queries
    stream = k.thread_id // lanes
    heads = [kv_head * group + k.minimum(first + i, group - 1) for i in range(queries)]  # a ragged last split repeats

    # the scale goes into q, with log2(e): scores are then exponents of 2
    query = [[x * (scale * _LOG2_E) for x in spread.load(q.at(sequence, head))] for head in heads]
    states = [_State(k, spread.width) for _ in heads]

    raw_length = context_lens.at(sequence).load()
    length = k.minimum(k.maximum(raw_length, 0), page_size * pages_per_sequence).bits(u32)
    table = block_tables.at(sequence)

    def attend(token: Value, ahead: int) -> None:
        """Scores and adds `ahead` tokens, `streams` apart, all of whose loads come first."""
        rows = [_locate(k, table, token + u * streams, length, num_pages, page_size) for u in range(ahead)]
        seen = [row[0] for row in rows]

        def read(pages: Pointer) -> list[list[Value]]:
            return [spread.load(pages.at(page, kv_head, slot), ok) for ok, page, slot in rows]

        keys, values = read(k_pages), read(v_pages)
        for mine, state in zip(query, states, strict=True):
            scores = [k.warp_sum(_dot(k, mine, key), lanes=lanes) for key in keys]
            highest: Value = state.highest
            for score, ok in zip(scores, seen, strict=True):
                highest = k.maximum(highest, k.select(ok, score, _LOWEST))
            state.rescale(k, highest)
            for score, ok, value in zip(scores, seen, values, strict=True):
                state.add(k, score, ok, value)

    # every stream takes the same number of rounds, so that whole warps meet at the shuffles
    step = streams * config.unroll
    with k.loop(0, length, step) as start:
        attend(start + stream, config.unroll)

    for state in states:
        _merge_lanes(k, state, lanes)
    marks, parts = _share(k, states, spread, head_dim, config.warps)
    k.barrier()
    for i, head in enumerate(heads):
        with k.when((k.warp_id == i % config.warps) & (first + i < group)):
            _merge_warps(k, marks, parts, i, out.at(sequence, head))


def _dot(k: Builder, a: list[Value], b: list[Value]) -> Value:
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = k.fma(x, y, total)
    return total


def _locate(
    k: Builder, table: Pointer, token: Value, length: Value, num_pages: int, page_size: int
) -> tuple[Value, Value, Value]:
    """(whether the token is there to be read, its page, its slot in the page)."""
    inside = token < length
    page = table.at(token // page_size).load(where=inside).bits(u32)
    return inside & (page < num_pages), page, token % page_size


def _merge_lanes(k: Builder, state: _State, lanes: int) -> None:
    """Merges the warp's groups of lanes; afterwards each holds the whole warp's state."""
    if lanes == WARP:
        return
    apart = {"lanes": WARP // lanes, "stride": lanes}
    state.rescale(k, k.warp_max(state.highest, **apart))
    state.total.set(k.warp_sum(state.total, **apart))
    for value in state.values:
        value.set(k.warp_sum(value, **apart))


def _share(k: Builder, states: list[_State], spread: _Spread, head_dim: int, warps: int) -> tuple[Pointer, Pointer]:
    """Writes each warp's states to shared memory: (queries, warps, (maximum, sum)) and (queries, warps, head_dim)."""
    marks = k.shared("marks", f32, (len(states), warps, 2))
    parts = k.shared("parts", f32, (len(states), warps, head_dim))
    first_token = k.lane_id < spread.lanes  # the other lanes hold the same
    for i, state in enumerate(states):
        marks.at(i, k.warp_id).store(0, (state.highest, state.total), where=k.lane_id == 0)
        for piece, dim in enumerate(spread.dims):
            values = state.values[piece * spread.run : (piece + 1) * spread.run]
            store_floats(parts.at(i, k.warp_id, dim), values, where=spread.where(piece, first_token))
    return marks, parts


def _merge_warps(k: Builder, marks: Pointer, parts: Pointer, query: int, out: Pointer) -> None:
    """Merges the warps' states of one query and writes its result; one warp does it."""
    _, warps, head_dim = parts.shape
    both = [marks.at(query, w).load(vector=2) for w in range(warps)]
    highest = functools.reduce(k.maximum, [mark for mark, _ in both])
    factors = [_exp2(k, mark - highest) for mark, _ in both]
    total = _dot(k, factors, [part for _, part in both])
    # no token was seen: the sum is 0, and so is every value
    scale = k.select(total == 0.0, k.const(f32, 0.0), k.const(f32, 1.0) / total)
    for base in range(0, head_dim, WARP):
        shares = [parts.at(query, w, k.lane_id).load(base) for w in range(warps)]
        out.at(k.lane_id).store(base, _dot(k, factors, shares) * scale)
