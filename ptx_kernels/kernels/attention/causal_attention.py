"""Prompt (prefill) attention kernel on tensor cores: FlashAttention-2 (Dao 2023).

A row of a tile is one query head of one token; a tile has all heads that share a KV head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...limits import MAX_PROMPT_DIMS, PIECE_DTYPES, causal_attention_takes
from ...ptx import WARP, Builder, KernelError, Pointer, Value, bf16, f32, kernel, s32, u32
from ...ptx.types import Type
from ..activation import LOG2_E
from ..gemm.fragments import TILE_COLUMNS, TILE_ROWS, two_activations
from ..gemm.pipeline import Pipeline, odd_pitch
from ..heads import Heads
from .bf16_parts import products
from .head_output import Parts, declare_parts
from .prompt_sources import Cached, Fresh, PromptPages, Source
from .prompt_tiles import Keys, QueryTile, Row, lane_rows
from .softmax import Softmax
from .step_rows import STEP
from .tensor_softmax import DEPTH, QUAD, Sums, TensorSoftmax, Tiles, multiply


@dataclass(frozen=True)
class CausalAttentionConfig:
    """Tiling of a prompt's attention over thread blocks, warps and pipeline stages.

    Attributes:
      warps: per thread block, each with 16 rows: queries of a group's heads, token by token.
      tokens: keys and values per pipeline step, a multiple of 16.
      stages: pipeline stages in shared memory, one step each.
      resident_blocks: thread blocks per multiprocessor that the registers must suffice for.
      splits: thread blocks that share the keys of a tile of queries (split-K), for prompt chunks
        over pages. With more than one, `merge_attention` merges their partial results.
    """

    warps: int = 4
    tokens: int = 32
    stages: int = 2
    resident_blocks: int = 2
    splits: int = 1

    def shared_bytes(
        self, head_dim: int, value_dim: int, parts: int, key_parts: int, dtype: str | None = None
    ) -> int:
        """Returns a thread block's shared memory in bytes; arguments as in `causal_attention`."""
        key, value = (odd_pitch(dim * bf16.size) for dim in (head_dim, value_dim))
        tokens = self.stages * self.tokens * key_parts * (key + value)
        rows = self.warps * TILE_ROWS
        flags = 0 if dtype is None else -(-self.warps * u32.size // 16) * 16
        scales = rows * 2 * f32.size if dtype == "f16" else 0
        return tokens + rows * parts * key + flags + scales


@kernel
def causal_attention(
    k: Builder,
    *,
    batch: int,
    time: int,
    heads: Heads,
    value_dim: int,
    softmax: Softmax,
    parts: int = 2,
    key_parts: int = 2,
    pages: PromptPages,
    named_pages: int | None = None,
    config: CausalAttentionConfig = CausalAttentionConfig(),
) -> None:
    """Causal attention: out[b, t, h] = softmax(scale * q[b, t, h] . K) V over the tokens up to t.

    Floats are sums of bf16 parts, see `bf16_parts`; products are accumulated in f32. Operands: q
    f32 (batch, time, num_heads, head_dim); the parts of keys and then of values, bf16 (batch, time,
    num_kv_heads, head_dim or value_dim); lengths s32 (batch,); sinks f32 (num_heads,). Result: f32
    (batch, time, num_heads, value_dim). Tokens at or beyond lengths[b] are not read; their results
    are unspecified.

    With a `dtype`, the tokens are chunks of sequences in a paged KV cache. Token t of sequence b
    has position context_lens[b] - lengths[b] + t in its sequence. It attends to all tokens up to
    itself, whose keys and values are in pages. Tokens whose page id is outside the pages do not
    count. Operands: q; the parts of pages of keys and then of values (num_pages, num_kv_heads,
    page_size, head_dim): one part for f16, and one or more for bf16, as written by `split_keys`;
    block_tables s32 (batch, pages_per_sequence); context_lens s32 (batch,); lengths; sinks. Tokens
    at or beyond lengths[b] get zeros. With several splits the results are `Parts` of batch * time
    tokens.

    Args:
      parts: number of parts of queries and of softmax weights. key_parts: of keys and values.
      named_pages: if set, the pages are in the order of block_tables (as `split_keys` writes them),
        and an id of block_tables is valid if it is below `named_pages`. None means that the ids of
        block_tables are indices of the pages.
    """
    _check(heads.head_dim, value_dim, (parts, key_parts), config)
    _check_pages(pages, heads.head_dim, value_dim, key_parts, config)
    num_heads, num_kv_heads, head_dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
    q = k.input("q", f32, (batch, time, num_heads, head_dim))
    tokens: Fresh | Cached
    if pages.dtype is None:
        tokens = Fresh.declare(k, (batch, time, num_kv_heads), (head_dim, value_dim), key_parts)
    else:
        shape = pages.shape(num_kv_heads, head_dim)
        tables = batch, pages.pages_per_sequence
        tokens = Cached.declare(k, pages.dtype, shape, tables, key_parts, named_pages)
    lengths = k.input("lengths", s32, (batch,))
    sink_logits = softmax.input_sinks(k, num_heads)
    result: Pointer | Parts
    if config.splits == 1:
        result = k.output("out", f32, (batch, time, num_heads, value_dim))
    else:
        result = declare_parts(k, batch * time, num_heads, value_dim, "f32", config.splits)
    group, threads, rows = heads.group, WARP * config.warps, TILE_ROWS * config.warps
    tiles = -(-time * group // rows)
    grid = tiles, num_kv_heads, batch * config.splits
    k.launch(grid, threads, resident_blocks=config.resident_blocks)

    # the last tiles see the most tokens, so they start first
    first = ((tiles - 1) - k.block_id()) * rows
    kv_head, (sequence, split) = k.block_id("y"), _sequence_and_split(k, config.splits)
    length = k.minimum(k.maximum(lengths.at(sequence).load(), 0), time).bits(u32)
    tile = QueryTile(k, first, rows, group, time, tokens.before(k, sequence, length))
    seen = tile.keys(length, softmax.window, config.tokens).part(split, config.splits)
    q = q.at(sequence, 0, kv_head * group).reshape(time, num_heads, head_dim)
    scales = tile.scales(q, length, softmax.factor) if pages.dtype == "f16" else None
    queries = tile.stage(q, length, softmax.factor, parts, threads, scales)
    numbers = [k.warp_id * TILE_ROWS + k.lane_id // QUAD + 8 * i for i in range(2)]
    mine = [tile.row(number) for number in numbers]
    logits = None
    if sink_logits is not None:
        logits = [sink_logits.at(kv_head * group + row.head).load() * LOG2_E for row in mine]
        if config.splits > 1:
            logits = [k.select(split == 0, logit, -math.inf) for logit in logits]
    totals = TensorSoftmax(k, value_dim, logits, tokens.type)
    of_warp = queries.at(k.warp_id * TILE_ROWS).reshape(*queries.shape)
    scoring = _Scoring(
        k,
        Tiles(lane_rows(k, of_warp), rows, queries.shape[1], parts),
        head_dim // DEPTH,
        products(parts, key_parts),
        tokens.type,
        None if scales is None else [scales.at(number, 1).load() for number in numbers],
        mine,
        softmax,
    )
    source = tokens.source(k, sequence, kv_head, seen, config.warps)
    _attend(k, tile, seen, source, scoring, totals, config)
    output = _TileOutput(k, result, sequence, time, kv_head * group, split)
    output.store(mine, totals, None if pages.dtype is None else length)


def _sequence_and_split(k: Builder, splits: int) -> tuple[Value, Value]:
    """Returns the thread block's sequence and split; the split is unused if there is only one."""
    both = k.block_id("z")
    return (both, both) if splits == 1 else (both // splits, both % splits)


@dataclass(frozen=True)
class _Scoring:
    """Emits the scores Q K^T, in base 2, of a warp's 16 query rows and one step's keys.

    Attributes:
      queries: the warp's query rows in shared memory.
      depths: number of 16-dimension slices of a head.
      counted: pairs of parts that are multiplied, from `products`.
      type: dtype of the parts.
      units: scale of the products for each of the lane's two rows; None means 1.
      rows: the lane's two query rows.
    """

    k: Builder
    queries: Tiles
    depths: int
    counted: Sequence[tuple[int, int]]
    type: Type
    units: Sequence[Value] | None
    rows: Sequence[Row]
    softmax: Softmax

    def scores(self, keys: Tiles) -> list[Sums]:
        """Returns the scores of a step's tokens, before masking."""
        k, zero = self.k, self.k.const(f32, 0.0)
        scores: list[Sums] = [[zero] * 4 for _ in range(keys.rows // TILE_COLUMNS)]
        for depth in range(self.depths):
            a = self.queries.load(k, 0, depth)
            for n in range(0, len(scores), 2):
                b = keys.load(k, n // 2, depth)
                for half in range(2):
                    column = [part[2 * half : 2 * half + 2] for part in b]
                    scores[n + half] = multiply(
                        k, scores[n + half], a, column, self.counted, self.type
                    )
        if (units := self.units) is not None:
            scores = [[x * units[j // 2] for j, x in enumerate(sums)] for sums in scores]
        return [[self.softmax.capped(k, x) for x in sums] for sums in scores]

    def masked(
        self, scores: Sequence[Sums], first: Value, known: Sequence[Value] | None
    ) -> list[Sums]:
        """Returns the scores, set to minus infinity where a row does not see the token.

        `first`: token of the first score. `known`: for each 16 tokens, whether they are in a page;
        None means that all are.
        """
        k, window = self.k, self.softmax.window
        # the last column that a row sees, relative to the lane's first one
        last = [(row.position - first - k.lane_id % QUAD * 2).bits(s32) for row in self.rows]
        before = None if window is None else [x - window for x in last]

        def masked(score: Value, row: int, column: int) -> Value:
            seen = last[row] >= column
            if before is not None:
                seen = seen & (before[row] < column)
            if known is not None:
                seen = seen & known[column // STEP]
            return k.select(seen, score, -math.inf)

        return [
            [masked(score, j // 2, TILE_COLUMNS * n + j % 2) for j, score in enumerate(tile)]
            for n, tile in enumerate(scores)
        ]


def _attend(
    k: Builder,
    tile: QueryTile,
    seen: Keys,
    source: Source,
    scoring: _Scoring,
    softmax: TensorSoftmax,
    config: CausalAttentionConfig,
) -> None:
    """Emits the loop that adds all tokens that the tile's rows see to the softmax, step by step."""
    copies, tokens, parts = source.copies, config.tokens, source.parts
    pipeline = Pipeline(k, config.stages, copies)
    pipeline.begin(seen.count)
    for start, stop, complete in tile.ranges(seen, scoring.softmax.window, source.complete):
        for step, buffers in pipeline.between(start, stop, seen.count):
            value_rows = buffers[-1]
            if len(buffers) == 1:
                value_rows = value_rows.at(parts * tokens).reshape(*value_rows.shape)
            of_keys = Tiles(two_activations(k, buffers[0]), tokens, copies[0].pitch, parts)
            of_values = Tiles(lane_rows(k, value_rows), tokens, copies[-1].pitch, parts)
            scores = scoring.scores(of_keys)
            if not complete:
                first = seen.first + step * tokens
                scores = scoring.masked(scores, first, source.known(first, tokens, seen.stop))
            weights = softmax.weights(scores)
            softmax.add(weights, of_values, scoring.queries.parts, scoring.counted)


@dataclass(frozen=True)
class _TileOutput:
    """Destination of the results of a thread block's query rows.

    `result`: out (batch, time, num_heads, value_dim), or the `Parts` of a split. `head`: the first
    query head of the group.
    """

    k: Builder
    result: Pointer | Parts
    sequence: Value
    time: int
    head: Value
    split: Value

    def store(self, rows: Sequence[Row], softmax: TensorSoftmax, length: Value | None) -> None:
        """Emits the stores of the lane's two rows.

        Tokens at or beyond `length` get zeros; `length` None means that their results are stored
        too.
        """
        k, shares = self.k, softmax.shares()
        vectors = softmax.normalized() if isinstance(self.result, Pointer) else None
        for i, row in enumerate(rows):
            m, total, vector = shares[i]
            head, inside = self.head + row.head, row.token < self.time
            if isinstance(self.result, Parts):
                at = self.sequence * self.time + row.token, head, self.split
                address = self.result.parts.at(*at)
                first = inside & (k.lane_id % QUAD == 0)
                self.result.marks.at(*at).store(0, (m, total), where=first)
            else:
                assert vectors is not None
                address, vector = self.result.at(self.sequence, row.token, head), vectors[i]
            if length is not None:
                real = row.token < length
                vector = [tuple(k.select(real, x, 0.0) for x in pair) for pair in vector]
            address = address.at(k.lane_id % QUAD * 2)
            for n, pair in enumerate(vector):
                address.store(8 * n, pair, where=inside)


def _check(
    head_dim: int, value_dim: int, parts: tuple[int, int], config: CausalAttentionConfig
) -> None:
    if not set(parts) <= {1, 2, 3}:
        raise KernelError(f"parts={parts[0]} and key_parts={parts[1]} must be 1, 2 or 3")
    if not causal_attention_takes(head_dim, value_dim, max(parts)):
        raise KernelError(
            f"head_dim={head_dim} and value_dim={value_dim} must be multiples of {DEPTH}, at most "
            f"{MAX_PROMPT_DIMS[max(parts)]}"
        )
    if config.tokens % DEPTH or config.tokens < DEPTH or config.stages < 2:
        raise KernelError(
            f"tokens={config.tokens} must be a multiple of {DEPTH}, and stages={config.stages} "
            "at least 2"
        )


def _check_pages(
    pages: PromptPages, head_dim: int, value_dim: int, key_parts: int, config: CausalAttentionConfig
) -> None:
    dtype, page_size = pages.dtype, pages.page_size
    if dtype is None:
        if config.splits != 1:
            raise KernelError(f"splits={config.splits} must be 1 where there are no pages")
        return
    parts_fit = dtype != "f16" or key_parts == 1
    if dtype not in PIECE_DTYPES or not parts_fit or value_dim != head_dim:
        raise KernelError(
            f"dtype={dtype!r} of pages must be one of {', '.join(PIECE_DTYPES)}, "
            f"key_parts={key_parts} of f16 1, and value_dim={value_dim} head_dim={head_dim}"
        )
    if page_size < STEP or page_size % STEP or pages.pages_per_sequence < 1 or config.splits < 1:
        raise KernelError(
            f"page_size={page_size} must be a multiple of {STEP}, and "
            f"pages_per_sequence={pages.pages_per_sequence} and splits={config.splits} at least 1"
        )
