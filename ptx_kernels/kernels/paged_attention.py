"""Attention of one query token per sequence over keys and values in pages, or in one run per
sequence.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ..ptx import WARP, Builder, KernelError, Value, f32, kernel, s32, u32
from .activation import LOG2_E, tanh
from .head_output import declare_result
from .pages import Spread, declare_pages
from .softmax import Merged, State, dot, merge_block


@dataclass(frozen=True)
class PagedAttentionConfig:
    """How the attention of one token spreads over the GPU.

    Attributes:
      warps: per block; they share one sequence and group of query heads, and split its tokens.
      queries: query heads of a group that one block holds in registers; K and V are read once for
        all of them.
      unroll: tokens of each lane in a round; as many are in flight for the next one.
      resident_blocks: blocks that a multiprocessor's registers must have room for.
      splits: blocks that a sequence's tokens are dealt to (flash decoding, Dao et al. 2023). More
        than one leave partial results, which `merge_attention` puts together.
      load_bytes: of a lane's loads of K and V, 16 or 8; with 8 a lane holds half as many values of
        each query.
    """

    warps: int = 4
    queries: int = 8
    unroll: int = 2
    resident_blocks: int = 2
    splits: int = 1
    load_bytes: int = 16


class _Held:
    """What was loaded in one round and is used in the next, in registers of its own."""

    def __init__(self, k: Builder, values: list[Value]) -> None:
        self._k, self._held = k, [k.var(value.type, value) for value in values]

    def swap(self, values: list[Value]) -> list[Value]:
        """Holds `values` from now on; what was held until now."""
        before: list[Value] = [self._k.var(held.type, held) for held in self._held]
        for held, value in zip(self._held, values, strict=True):
            held.set(value)
        return before


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
    contiguous: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    output: str = "f32",
    config: PagedAttentionConfig = PagedAttentionConfig(),
) -> None:
    """out[b, h] = softmax(scale * q[b, h] . K) V over the first context_lens[b] tokens of sequence
    b.

    A block has one sequence and up to `queries` query heads that share a KV head. A token's K is
    spread over `lanes` lanes, `load_bytes` each, so a warp holds WARP / lanes tokens at once; every
    group of lanes runs its own online softmax, merged over groups by shuffles and over warps in
    shared memory. Tokens beyond the context or before the window, and those whose page id is
    outside the pages, are not read. No token: zeros.

    Operands: q f32 (batch, num_heads, head_dim); the pages (see `declare_pages`); block_tables s32
    (batch, pages_per_sequence); context_lens s32 (batch,); with `sinks`, f32 (num_heads,).

    Args:
      contiguous: sequence b's tokens are page b, a page holds a whole sequence, and there are no
        block tables.
      window: only the last `window` tokens of a context are seen.
      soft_cap: scores become soft_cap * tanh(score / soft_cap).
      sinks: an extra logit per query head in the softmax's denominator, with no value.
      output: `f32`, or with one split `q8_1`; see `declare_result`.
    """
    if num_heads % num_kv_heads:
        raise KernelError(
            f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}"
        )
    if contiguous and (num_pages, pages_per_sequence) != (batch, 1):
        raise KernelError(
            f"contiguous: num_pages={num_pages} must be batch={batch}, pages_per_sequence 1"
        )
    if soft_cap is not None and not soft_cap > 0:
        raise KernelError(f"soft_cap={soft_cap} must be positive")
    if config.load_bytes not in (8, 16):
        raise KernelError(f"load_bytes={config.load_bytes} must be 8 or 16")
    group = num_heads // num_kv_heads
    queries, splits = min(config.queries, group), config.splits
    q = k.input("q", f32, (batch, num_heads, head_dim))
    k_pages, v_pages = declare_pages(k.input, dtype, (num_pages, num_kv_heads, page_size, head_dim))
    block_tables = None if contiguous else k.input("block_tables", s32, (batch, pages_per_sequence))
    context_lens = k.input("context_lens", s32, (batch,))
    sink_logits = k.input("sinks", f32, (num_heads,)) if sinks else None
    write = declare_result(k, batch, num_heads, head_dim, output, splits)
    head_blocks = -(-group // queries)
    k.launch(
        (num_kv_heads * head_blocks, batch, splits),
        WARP * config.warps,
        resident_blocks=config.resident_blocks,
    )
    spread = Spread(k, head_dim, config.load_bytes // k_pages.rows.type.size)
    streams = WARP // spread.lanes * config.warps  # tokens that the block holds at once
    step = streams * config.unroll

    sequence, split = k.block_id("y"), k.block_id("z")
    kv_head, first = k.block_id() // head_blocks, (k.block_id() % head_blocks) * queries
    stream = k.thread_id // spread.lanes
    heads = [
        kv_head * group + k.minimum(first + i, group - 1) for i in range(queries)
    ]  # a ragged last one repeats

    # scores are exponents of 2; without a soft cap, their factor goes into q
    factor = scale * LOG2_E if soft_cap is None else scale / soft_cap
    query = [[x * factor for x in spread.load(q.at(sequence, head))] for head in heads]
    state = State(k, queries, spread)
    if sink_logits is not None:
        mine = [
            k.minimum(first + state.dealt.item(slot), group - 1)
            for slot in range(state.dealt.slots)
        ]
        logits = [sink_logits.at(kv_head * group + i).load() * LOG2_E for i in mine]
        state.add_sinks(k, logits, (stream == 0) & (split == 0))

    length = k.minimum(
        k.maximum(context_lens.at(sequence).load(), 0), page_size * pages_per_sequence
    )
    start, stop = _share_of(k, length, window, split, splits, step)

    def page_of(token: Value) -> Value:
        if block_tables is None:
            return sequence
        return block_tables.at(sequence, token // page_size).load(where=token < stop).bits(u32)

    def load(token: Value, page: Value) -> list[Value]:
        """Whether the token is there to be read, and a lane's share of its K and of its V."""
        seen = (token < stop) & (page < num_pages)
        place = (page, kv_head, token if block_tables is None else token % page_size)
        return [seen, *k_pages.load(spread, place, seen), *v_pages.load(spread, place, seen)]

    def attend(tokens: list[list[Value]]) -> None:
        seen, loaded = [token[0] for token in tokens], [token[1:] for token in tokens]
        half = len(loaded[0]) // 2
        keys, values = (
            [k_pages.values(x[:half]) for x in loaded],
            [v_pages.values(x[half:]) for x in loaded],
        )
        scores = [state.dealt.sum([dot(k, mine, key) for mine in query]) for key, _ in keys]
        scores = [
            s if unit is None else [x * unit for x in s]
            for s, (_, unit) in zip(scores, keys, strict=True)
        ]
        if soft_cap is not None:
            scores = [[tanh(k, x) * (soft_cap * LOG2_E) for x in s] for s in scores]
        state.add(k, scores, seen, values)

    # While a round computes, the next one's K and V are on their way, and the page ids of the one
    # after that. Every stream takes the same number of rounds, so that whole warps meet at the
    # shuffles.
    firsts = [stream + u * streams + start for u in range(config.unroll)]
    pages = [_Held(k, [page_of(token)]) for token in firsts]
    held = [
        _Held(k, load(t, *page.swap([page_of(t + step)])))
        for t, page in zip(firsts, pages, strict=True)
    ]
    with k.loop(start, stop, step) as at:
        tokens = [at + (stream + (u * streams + step)) for u in range(config.unroll)]
        following = [
            load(t, *page.swap([page_of(t + step)])) for t, page in zip(tokens, pages, strict=True)
        ]
        attend([mine.swap(loaded) for mine, loaded in zip(held, following, strict=True)])

    def finish(query: int, merged: Merged) -> None:
        place = (sequence, heads[query], split) if splits > 1 else (sequence, heads[query])
        with k.when(first + query < group) if group % queries else contextlib.nullcontext():
            write(place, merged)

    merge_block(k, state, spread, head_dim, config.warps, finish)


def _share_of(
    k: Builder, length: Value, window: int | None, split: Value, splits: int, step: int
) -> tuple[Value | int, Value]:
    """A split's tokens, from the first to below the second: rounds of `step` or more, but for the
    last splits.
    """
    start: Value | int = 0 if window is None else k.maximum(length - window, 0).bits(u32)
    stop = length.bits(u32)
    if splits == 1:
        return start, stop
    share = k.maximum((stop - start + (splits - 1)) // splits, step)
    first = split * share + start
    return first, k.minimum(first + share, stop)
