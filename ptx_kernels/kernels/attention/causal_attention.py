"""Attention of prompts on tensor cores: FlashAttention-2 (Dao 2023) over rows of a head's group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...limits import MAX_PROMPT_DIMS, causal_attention_takes
from ...ptx import WARP, Builder, KernelError, Value, bf16, f32, kernel, s32, u32
from ..activation import LOG2_E, tanh
from ..gemm.fragments import TILE_COLUMNS, TILE_ROWS, two_activations
from ..gemm.pipeline import Pipeline, odd_pitch
from .bf16_parts import products
from .prompt_tiles import QueryTile, Row, TokenRows, lane_rows
from .tensor_softmax import DEPTH, QUAD, Sums, TensorSoftmax, Tiles, multiply


@dataclass(frozen=True)
class CausalAttentionConfig:
    """Tiling of a prompt's attention.

    Attributes:
      warps: per block, each with 16 rows: queries of the heads of a group, token by token.
      tokens: whose keys and values a step has, a multiple of 16.
      stages: steps in shared memory.
      resident_blocks: blocks that a multiprocessor's registers must have room for.
    """

    warps: int = 4
    tokens: int = 32
    stages: int = 2
    resident_blocks: int = 2

    def shared_bytes(self, head_dim: int, value_dim: int, parts: int, key_parts: int) -> int:
        """Shared memory of a block; arguments as of `causal_attention`."""
        key, value = (odd_pitch(dim * bf16.size) for dim in (head_dim, value_dim))
        tokens = self.stages * self.tokens * key_parts * (key + value)
        return tokens + self.warps * TILE_ROWS * parts * key


@kernel
def causal_attention(
    k: Builder,
    *,
    batch: int,
    time: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    parts: int = 2,
    key_parts: int = 2,
    config: CausalAttentionConfig = CausalAttentionConfig(),
) -> None:
    """out[b, t, h] = softmax(scale * q[b, t, h] . K) V over the tokens up to t.

    Floats are sums of bf16, see `bf16_parts`; products are added up in f32. Operands: q f32 (batch,
    time, num_heads, head_dim); the parts of keys and then of values, bf16 (batch, time,
    num_kv_heads, head_dim or value_dim); lengths s32 (batch,); sinks f32 (num_heads,). Result: f32
    (batch, time, num_heads, value_dim). Tokens at or beyond lengths[b] are not read; what is
    written for them means nothing.

    Args:
      window: a token sees the last `window` tokens, itself included.
      soft_cap: scores become soft_cap * tanh(score / soft_cap).
      sinks: an extra logit per query head in the softmax's denominator, with no value.
      parts: of queries and of the softmax's weights. key_parts: of keys and values.
    """
    _check(num_heads, num_kv_heads, head_dim, value_dim, soft_cap, (parts, key_parts), config)
    q = k.input("q", f32, (batch, time, num_heads, head_dim))
    keys, values = (
        [k.input(f"{name}{i}", bf16, (batch, time, num_kv_heads, dim)) for i in range(key_parts)]
        for name, dim in (("k", head_dim), ("v", value_dim))
    )
    lengths = k.input("lengths", s32, (batch,))
    sink_logits = k.input("sinks", f32, (num_heads,)) if sinks else None
    out = k.output("out", f32, (batch, time, num_heads, value_dim))
    group, threads, rows = num_heads // num_kv_heads, WARP * config.warps, TILE_ROWS * config.warps
    tiles = -(-time * group // rows)
    k.launch((tiles, num_kv_heads, batch), threads, resident_blocks=config.resident_blocks)

    # the last tiles have the most tokens before them: they come first
    tile = QueryTile(k, ((tiles - 1) - k.block_id()) * rows, rows, group, time)
    kv_head, sequence = k.block_id("y"), k.block_id("z")
    length = k.minimum(k.maximum(lengths.at(sequence).load(), 0), time).bits(u32)
    seen = tile.keys(length, window, config.tokens)
    heads = q.at(sequence, 0, kv_head * group).reshape(time, num_heads, head_dim)
    # scores are exponents of 2; without a soft cap, their factor goes into q
    factor = scale * LOG2_E if soft_cap is None else scale / soft_cap
    queries = tile.stage(heads, length, factor, parts, threads)
    mine = [tile.row(k.warp_id * TILE_ROWS + k.lane_id // QUAD + 8 * i) for i in range(2)]
    logits = None
    if sink_logits is not None:
        logits = [sink_logits.at(kv_head * group + row.head).load() * LOG2_E for row in mine]
    softmax = TensorSoftmax(k, value_dim, logits)

    # where they are equally wide, one address serves keys and values
    together = [[*keys, *values]] if head_dim == value_dim else [keys, values]
    copies = [TokenRows(k, each, sequence, kv_head, seen, threads) for each in together]
    counted = products(parts, key_parts)
    of_warp = queries.at(k.warp_id * TILE_ROWS).reshape(*queries.shape)
    of_queries = Tiles(lane_rows(k, of_warp), rows, queries.shape[1], parts)
    pipeline = Pipeline(k, config.stages, copies)
    pipeline.begin(seen.count)
    for start, stop, whole in tile.ranges(seen, window):
        for step, places in pipeline.between(start, stop, seen.count):
            value_rows = places[-1]
            if len(places) == 1:
                value_rows = value_rows.at(key_parts * config.tokens).reshape(*value_rows.shape)
            of_keys = Tiles(
                two_activations(k, places[0]), config.tokens, copies[0].pitch, key_parts
            )
            of_values = Tiles(lane_rows(k, value_rows), config.tokens, copies[-1].pitch, key_parts)
            scores = _scores(k, of_queries, of_keys, head_dim // DEPTH, config.tokens, counted)
            if soft_cap is not None:
                scores = [[tanh(k, x) * (soft_cap * LOG2_E) for x in sums] for sums in scores]
            if not whole:
                scores = _masked(k, scores, mine, seen.first + step * config.tokens, window)
            weights = softmax.weights(scores)
            softmax.add(weights, of_values, parts, counted)
    for row, vector in zip(mine, softmax.normalized(), strict=True):
        place = out.at(sequence, row.token, kv_head * group + row.head).at(k.lane_id % QUAD * 2)
        for n, pair in enumerate(vector):
            place.store(8 * n, pair, where=row.token < time)


def _check(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    soft_cap: float | None,
    parts: tuple[int, int],
    config: CausalAttentionConfig,
) -> None:
    if num_heads % num_kv_heads:
        raise KernelError(
            f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}"
        )
    if not set(parts) <= {1, 2, 3}:
        raise KernelError(f"parts={parts[0]} and key_parts={parts[1]} must be 1, 2 or 3")
    if not causal_attention_takes(head_dim, value_dim, max(parts)):
        raise KernelError(
            f"head_dim={head_dim} and value_dim={value_dim} must be multiples of {DEPTH}, at most "
            f"{MAX_PROMPT_DIMS[max(parts)]}"
        )
    if soft_cap is not None and not soft_cap > 0:
        raise KernelError(f"soft_cap={soft_cap} must be positive")
    if config.tokens % DEPTH or config.tokens < DEPTH or config.stages < 2:
        raise KernelError(
            f"tokens={config.tokens} must be a multiple of {DEPTH}, and stages={config.stages} "
            "at least 2"
        )


def _scores(
    k: Builder,
    queries: Tiles,
    keys: Tiles,
    depths: int,
    tokens: int,
    counted: Sequence[tuple[int, int]],
) -> list[Sums]:
    """Scores of a warp's rows and the step's tokens."""
    zero = k.const(f32, 0.0)
    scores: list[Sums] = [[zero] * 4 for _ in range(tokens // TILE_COLUMNS)]
    for depth in range(depths):
        a = queries.load(k, 0, depth)
        for n in range(0, len(scores), 2):
            b = keys.load(k, n // 2, depth)
            for half in range(2):
                column = [part[2 * half : 2 * half + 2] for part in b]
                scores[n + half] = multiply(k, scores[n + half], a, column, counted)
    return scores


def _masked(
    k: Builder, scores: Sequence[Sums], rows: Sequence[Row], first: Value, window: int | None
) -> list[Sums]:
    """Scores of tokens from `first` on, minus infinity where a row does not see the token."""
    # the last column that a row sees, counted from the lane's first one
    last = [(row.token - first - k.lane_id % QUAD * 2).bits(s32) for row in rows]
    before = None if window is None else [x - window for x in last]

    def masked(score: Value, row: int, column: int) -> Value:
        seen = last[row] >= column
        if before is not None:
            seen = seen & (before[row] < column)
        return k.select(seen, score, -math.inf)

    return [
        [masked(score, j // 2, TILE_COLUMNS * n + j % 2) for j, score in enumerate(tile)]
        for n, tile in enumerate(scores)
    ]
