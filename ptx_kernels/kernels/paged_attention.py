"""Attention of one query token per sequence over keys and values in pages."""
from __future__ import annotations

import math
from dataclasses import dataclass

from ..ptx import WARP, Builder, KernelError, Pointer, Value, Var, f32, kernel, s32, u32
from .vectors import float_type, load_floats, store_floats

HEAD_DIMS = tuple(range(32, 257, 32))
_LOG2_E = math.log2(math.e)
_LOWEST = -3.0e38  # below every score; finite, so that no difference of two of them is NaN


@dataclass(frozen=True)
class PagedAttentionConfig:
    """Attributes:
      warps: per block; they share one sequence and group of query heads, and split its tokens.
      queries: query heads of a group that one block holds in registers; K and V are read once for all of them.
      unroll: tokens of each lane in flight.
    """

    warps: int = 4
    queries: int = 8
    unroll: int = 2


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
def paged_attention(k: Builder, *, batch: int, num_heads: int, num_kv_heads: int, head_dim: int, num_pages: int,
                    page_size: int, pages_per_sequence: int, scale: float, dtype: str = "f32",
                    config: PagedAttentionConfig = PagedAttentionConfig()) -> None:
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
    per_load = 16 // storage.size
    loads = head_dim // per_load  # 16-byte pieces of a token's K
    lanes = min(WARP, 1 << (loads - 1).bit_length())
    pieces = -(-loads // lanes)  # that each lane holds: 2 for the widest f32 heads
    width = pieces * per_load
    streams = WARP // lanes * config.warps
    splits = -(-group // queries)

    q = k.input("q", f32, (batch, num_heads, head_dim))
    k_pages = k.input("k_pages", storage, (num_pages, num_kv_heads, page_size, head_dim))
    v_pages = k.input("v_pages", storage, (num_pages, num_kv_heads, page_size, head_dim))
    block_tables = k.input("block_tables", s32, (batch, pages_per_sequence))
    context_lens = k.input("context_lens", s32, (batch,))
    out = k.output("out", f32, (batch, num_heads, head_dim))
    k.launch((num_kv_heads * splits, batch), WARP * config.warps)

    sequence = k.block_id("y")
    kv_head, first = k.block_id() // splits, (k.block_id() % splits) * queries
    lane = k.lane_id % lanes
    stream = k.warp_id * (WARP // lanes) + k.lane_id // lanes
    dims = [lane * per_load + piece * lanes * per_load for piece in range(pieces)]
    holds = [d < head_dim if (piece + 1) * lanes > loads else None for piece, d in enumerate(dims)]
    heads = [kv_head * group + k.minimum(first + i, group - 1) for i in range(queries)]  # a ragged last split repeats

    # the scale goes into q, with log2(e): scores are then exponents of 2
    query = [[x * (scale * _LOG2_E) for d, held in zip(dims, holds, strict=True)
              for x in load_floats(q.at(sequence, head, d), per_load, where=held)] for head in heads]
    states = [_State(k, width) for _ in heads]

    raw_length = context_lens.at(sequence).load()
    length = k.minimum(k.maximum(raw_length, 0), page_size * pages_per_sequence).bits(u32)
    table = block_tables.at(sequence)

    def attend(token: Value, ahead: int) -> None:
        """Scores and adds `ahead` tokens, `streams` apart, all of whose loads come first."""
        rows = [_locate(k, table, token + u * streams, length, num_pages, page_size) for u in range(ahead)]
        seen = [row[0] for row in rows]

        def read(pages: Pointer) -> list[list[Value]]:
            return [[x for d, held in zip(dims, holds, strict=True)
                     for x in load_floats(pages.at(page, kv_head, slot, d), per_load,
                                          where=ok if held is None else ok & held)]
                    for ok, page, slot in rows]

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
    _merge_warps(k, states, out, sequence, heads, first, group, head_dim, dims, per_load, config.warps, holds)


def _dot(k: Builder, a: list[Value], b: list[Value]) -> Value:
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = k.fma(x, y, total)
    return total


def _locate(k: Builder, table: Pointer, token: Value, length: Value, num_pages: int,
            page_size: int) -> tuple[Value, Value, Value]:
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


def _merge_warps(k: Builder, states: list[_State], out: Pointer, sequence: Value, heads: list[Value], first: Value,
                 group: int, head_dim: int, dims: list[Value], per_load: int, warps: int,
                 holds: list[Value | None]) -> None:
    """Writes each warp's state to shared memory; then warp w merges and stores queries w, w + warps, ..."""
    queries = len(states)
    marks = k.shared("marks", f32, (queries, warps, 2))  # maximum, sum
    parts = k.shared("parts", f32, (queries, warps, head_dim))
    low_lanes = k.lane_id == k.lane_id % (WARP if len(dims) > 1 else _lanes(head_dim, per_load))
    for i, state in enumerate(states):
        marks.at(i, k.warp_id).store(0, (state.highest, state.total), where=k.lane_id == 0)
        for piece, (d, held) in enumerate(zip(dims, holds, strict=True)):
            where = low_lanes if held is None else low_lanes & held
            values = state.values[piece * per_load:(piece + 1) * per_load]
            store_floats(parts.at(i, k.warp_id, d), values, where=where)
    k.barrier()
    for i in range(queries):
        mine = (k.warp_id == i % warps) & (first + i < group)
        with k.when(mine):
            both = [marks.at(i, w).load(vector=2) for w in range(warps)]
            highest = both[0][0]
            for other, _ in both[1:]:
                highest = k.maximum(highest, other)
            factors = [_exp2(k, m - highest) for m, _ in both]
            total = k.const(f32, 0.0)
            for factor, (_, part) in zip(factors, both, strict=True):
                total = k.fma(factor, part, total)
            # no token was seen: the sum is 0 and so are the values
            scale = k.select(total == 0.0, k.const(f32, 0.0), k.const(f32, 1.0) / total)
            for base in range(0, head_dim, WARP):
                value = k.const(f32, 0.0)
                for w, factor in enumerate(factors):
                    value = k.fma(factor, parts.at(i, w, k.lane_id + base).load(), value)
                out.at(sequence, heads[i], k.lane_id + base).store(0, value * scale)


def _lanes(head_dim: int, per_load: int) -> int:
    return min(WARP, 1 << (head_dim // per_load - 1).bit_length())
