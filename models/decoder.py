"""The decoder: a tree of Flax NNX modules whose weights stay packed.

A pass differs from another only in what its attention reads and writes, so each pass is a function
`attend(layer, q, k, v) -> out` given to the same blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jax_q4k as jq

from . import rope
from .attention import causal_attention
from .cache import PagedCache, Pages, append
from .config import Config

Weight = jq.QuantizedArray | jax.Array

#: (layer index, q, k, v), each (batch, time, heads, head_dim) -> (batch, time, num_heads, head_dim).
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


class Linear(nnx.Module):
    """y = x @ W.T + b; W (n, k) packed or float, b float32 (n,) or None."""

    def __init__(self, weight: Weight, bias: jax.Array | None = None) -> None:
        self.weight = nnx.Param(weight)
        self.bias = None if bias is None else nnx.Param(bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jq.matmul(x, self.weight.get_value())
        return y if self.bias is None else y + self.bias.get_value()


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * w along the last axis, in float32."""

    def __init__(self, weight: jax.Array, eps: float) -> None:
        self.weight = nnx.Param(weight)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(mean_square + self.eps) * self.weight.get_value()


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, gate: Linear, up: Linear, down: Linear) -> None:
        self.gate, self.up, self.down = gate, up, down

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; `q_norm` and `k_norm` are per head (Qwen 3)."""

    def __init__(
        self,
        config: Config,
        *,
        query: Linear,
        key: Linear,
        value: Linear,
        output: Linear,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        self.config = config
        self.query, self.key, self.value, self.output = query, key, value, output
        self.q_norm, self.k_norm = q_norm, k_norm

    def __call__(self, x: jax.Array, angles: tuple[jax.Array, jax.Array], layer: int, attend: Attend) -> jax.Array:
        """x (batch, time, hidden_size), angles as `rope.angles` of the positions (batch, time)."""
        config, leading = self.config, x.shape[:-1]
        q = self.query(x).reshape(*leading, config.num_heads, config.head_dim)
        k = self.key(x).reshape(*leading, config.num_kv_heads, config.head_dim)
        v = self.value(x).reshape(*leading, config.num_kv_heads, config.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rope.rotate(q, *angles, interleaved=config.interleaved_rope)
        k = rope.rotate(k, *angles, interleaved=config.interleaved_rope)
        return self.output(attend(layer, q, k, v).reshape(*leading, -1))


class Block(nnx.Module):
    """One layer: attention, then the feed-forward network, each normalized before and added after."""

    def __init__(self, attn_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: MLP) -> None:
        self.attn_norm, self.attention = attn_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def __call__(self, x: jax.Array, angles: tuple[jax.Array, jax.Array], layer: int, attend: Attend) -> jax.Array:
        x = x + self.attention(self.attn_norm(x), angles, layer, attend)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """A decoder-only transformer of the llama family.

    Args:
      embedding: (vocab_size, hidden_size), packed or float.
      output: None where it is tied to the embedding.
      rope_frequencies: (rope_dim / 2,), as `rope.frequencies` gives them.
      rope_divisors: (rope_dim / 2,), what went into the frequencies; kept so that a saved file holds it.
    """

    def __init__(
        self,
        config: Config,
        *,
        embedding: Weight,
        blocks: list[Block],
        norm: RMSNorm,
        output: Linear | None,
        rope_frequencies: jax.Array,
        rope_divisors: jax.Array | None = None,
    ) -> None:
        self.config = config
        self.embedding = nnx.Param(embedding)
        self.blocks = nnx.List(blocks)
        self.norm = norm
        self.output = output
        self.rope_frequencies = nnx.Variable(rope_frequencies)
        self.rope_divisors = None if rope_divisors is None else nnx.Variable(rope_divisors)

    def __call__(self, tokens: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """Full causal pass: tokens (batch, time) int32 -> logits (batch, time, vocab_size) float32.

        lengths: int32 (batch,), where rows are padded on the right; None: no padding.
        """
        batch, time = tokens.shape
        lengths = jnp.full(batch, time) if lengths is None else lengths
        x = self._hidden(tokens, _positions(tokens), lambda _, q, k, v: causal_attention(q, k, v, lengths))
        return self._logits(x)

    def prefill(
        self, tokens: jax.Array, lengths: jax.Array, cache: PagedCache, *, all_positions: bool = False
    ) -> tuple[jax.Array, PagedCache]:
        """A full causal pass that stores keys and values from position 0 on.

        Args:
          tokens: (batch, time) int32, padded on the right; any id serves as padding.
          lengths: (batch,) int32, 1 to time and to the cache's capacity.
          cache: of `batch` sequences; what it held is overwritten.
          all_positions: logits of every token instead of each row's last.

        Returns:
          Logits float32 (batch, vocab_size), or (batch, time, vocab_size) of all positions, and the cache.
        """
        positions = _positions(tokens)
        slots = cache.slots(positions, positions < lengths[:, None])
        pages: list[Pages] = []

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            pages.append(append(cache.pages[layer], k, v, slots))
            return causal_attention(q, k, v, lengths)

        x = self._hidden(tokens, positions, attend)
        if not all_positions:
            x = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return self._logits(x), dataclasses.replace(cache, pages=pages, context_lens=lengths)

    def decode(
        self, token: jax.Array, cache: PagedCache, active: jax.Array | None = None
    ) -> tuple[jax.Array, PagedCache]:
        """One step: stores one token per sequence and predicts the next.

        Args:
          token: (batch,) int32.
          cache: with room for one more token in every active sequence.
          active: bool (batch,), None for all; the other sequences are left as they are and their logits
            mean nothing.

        Returns:
          Logits float32 (batch, vocab_size), and the cache.
        """
        positions = cache.context_lens[:, None]
        active = jnp.ones(token.shape, bool) if active is None else active
        slots = cache.slots(positions, active[:, None])
        lens = cache.context_lens + active
        pages: list[Pages] = []

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            pages.append(append(cache.pages[layer], k, v, slots))
            return jq.paged_attention(q[:, 0], *pages[layer], cache.block_tables, lens)[:, None]

        x = self._hidden(token[:, None], positions, attend)
        return self._logits(x[:, 0]), dataclasses.replace(cache, pages=pages, context_lens=lens)

    def _hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        angles = rope.angles(positions, self.rope_frequencies.get_value())
        x = jq.embedding(tokens, self.embedding.get_value())
        for layer, block in enumerate(self.blocks):
            with jax.named_scope(f"layer{layer}"):  # shows in profiles and in XLA's names of launches
                x = block(x, angles, layer, attend)
        return x

    def _logits(self, x: jax.Array) -> jax.Array:
        x = self.norm(x)
        return jq.matmul(x, self.embedding.get_value()) if self.output is None else self.output(x)


def _positions(tokens: jax.Array) -> Any:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
