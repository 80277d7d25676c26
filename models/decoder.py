"""The decoder: a tree of Flax NNX modules whose weights stay packed.

A pass differs from another only in what its attention reads and writes, so each pass is a function
`attend(layer, attention, q, k, v, x)` given to the same blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jax_q4k as jq

from . import rope
from .kv_cache import PagedCache, Pages, append, rows, scales
from .config import Config

Weight = jq.QuantizedArray | jax.Array
Angles = tuple[jax.Array, jax.Array]  # as `rope.angles` gives them

#: (layer index, its attention, q, k, v as projected, each (batch, time, heads, head_dim), x)
#: -> x plus what the attention makes of them, (batch, time, hidden_size) both.
Attend = Callable[[int, "Attention", jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


class Linear(nnx.Module):
    """y = x @ W.T + b; W (n, k) packed or float, b float32 (n,) or None."""

    def __init__(self, weight: Weight, bias: jax.Array | None = None) -> None:
        self.weight = nnx.Param(weight)
        self.bias = None if bias is None else nnx.Param(bias)

    def __call__(self, x: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        """x (..., k) -> (..., n), plus `residual` of that shape."""
        bias = None if self.bias is None else self.bias.get_value()
        return jq.matmul(x, self.weight.get_value(), bias=bias, residual=residual)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * w along the last axis, in float32."""

    def __init__(self, weight: jax.Array, eps: float) -> None:
        self.weight = nnx.Param(weight)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return jq.rms_norm(x, self.weight.get_value(), eps=self.eps)


# Where a step may be one kernel, the modules of its parts hand it their weights. Another module may
# stand in a Linear's place, such as an adapter around it: then each part runs by itself.


def _are_linear(*modules: nnx.Module) -> bool:
    return all(type(module) is Linear for module in modules)


def _project(x: jax.Array, norm: RMSNorm, projections: Sequence[Linear]) -> Sequence[jax.Array]:
    """projection(norm(x)) of each."""
    if not _are_linear(*projections):
        h = norm(x)
        return [projection(h) for projection in projections]
    return jq.qkv_matmul(
        x,
        [p.weight.get_value() for p in projections],
        norm_weight=norm.weight.get_value(),
        eps=norm.eps,
        biases=[None if p.bias is None else p.bias.get_value() for p in projections],
    )


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, gate: Linear, up: Linear, down: Linear) -> None:
        self.gate, self.up, self.down = gate, up, down

    def __call__(self, x: jax.Array, norm: RMSNorm) -> jax.Array:
        """x + the network of norm(x)."""
        modules = self.gate, self.up, self.down
        if _are_linear(*modules) and all(module.bias is None for module in modules):
            weights = (module.weight.get_value() for module in modules)
            return jq.mlp(
                x, *weights, norm_weight=norm.weight.get_value(), eps=norm.eps, residual=x
            )
        gate, up = _project(x, norm, (self.gate, self.up))
        return x + self.down(jax.nn.silu(gate) * up)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; `q_norm` and `k_norm` are per head (Qwen
    3).
    """

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

    def __call__(self, x: jax.Array, norm: RMSNorm, layer: int, attend: Attend) -> jax.Array:
        """x + the attention of norm(x), x (batch, time, hidden_size)."""
        config, leading = self.config, x.shape[:-1]
        q, k, v = (
            y.reshape(*leading, -1, config.head_dim)
            for y in _project(x, norm, (self.query, self.key, self.value))
        )
        return attend(layer, self, q, k, v, x)

    def add_output(self, out: jax.Array, x: jax.Array) -> jax.Array:
        """x + the output projection of the heads' vectors, out (batch, time, num_heads,
        head_dim).
        """
        out = out.reshape(*x.shape[:-1], -1)
        return self.output(out, x) if _are_linear(self.output) else x + self.output(out)

    def add_paged(
        self, q: jax.Array, pages: Pages, block_tables: jax.Array, lens: jax.Array, x: jax.Array
    ) -> jax.Array:
        """x + the attention of one turned q per sequence, (batch, 1, num_heads, head_dim), over its
        pages.
        """
        k_pages, v_pages, *_ = pages
        given = q[:, 0], k_pages, v_pages, block_tables, lens
        if not _are_linear(self.output):
            return self.add_output(jq.paged_attention(*given, **scales(pages))[:, None], x)
        weight, bias = self.output.weight.get_value(), self.output.bias
        y = jq.paged_attention_matmul(
            *given,
            weight,
            bias=None if bias is None else bias.get_value(),
            residual=x[:, 0],
            **scales(pages),
        )
        return y[:, None]

    def rotate(self, q: jax.Array, k: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array]:
        """q and k, normalized where the model does so, turned by `rope.angles` of the positions
        (batch, time).
        """
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        interleaved = self.config.interleaved_rope
        return rope.rotate(q, *angles, interleaved=interleaved), rope.rotate(
            k, *angles, interleaved=interleaved
        )

    def rotate_and_append(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        angles: Angles,
        pages: Pages,
        slots: jax.Array,
    ) -> tuple[jax.Array, Pages]:
        """The turned q, and the pages with the turned k and v at slots (batch * time,)."""
        norms = self.q_norm, self.k_norm
        weights = [None if norm is None else norm.weight.get_value() for norm in norms]
        cos, sin = angles
        turned, *updated = jq.rope_append(
            rows(q),
            rows(k),
            rows(v),
            pages[0],
            pages[1],
            slots,
            rows(cos),
            rows(sin),
            interleaved=self.config.interleaved_rope,
            q_norm=weights[0],
            k_norm=weights[1],
            eps=None if self.q_norm is None else self.q_norm.eps,
            **scales(pages),
        )
        return turned.reshape(q.shape), tuple(updated)


class Block(nnx.Module):
    """One layer: attention, then the feed-forward network, each normalized before and added
    after.
    """

    def __init__(
        self, attn_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: MLP
    ) -> None:
        self.attn_norm, self.attention = attn_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def __call__(self, x: jax.Array, layer: int, attend: Attend) -> jax.Array:
        return self.mlp(self.attention(x, self.attn_norm, layer, attend), self.mlp_norm)


class Decoder(nnx.Module):
    """A decoder-only transformer of the llama family.

    Args:
      embedding: (vocab_size, hidden_size), packed or float.
      output: None where it is tied to the embedding.
      rope_frequencies: (rope_dim / 2,), as `rope.frequencies` gives them.
      rope_divisors: (rope_dim / 2,), what went into the frequencies; kept so that a saved file
        holds it.
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
        angles = self._angles(_positions(tokens))

        def attend(
            _: int, attention: Attention, q: jax.Array, k: jax.Array, v: jax.Array, x: jax.Array
        ) -> jax.Array:
            return attention.add_output(
                jq.causal_attention(*attention.rotate(q, k, angles), v, lengths), x
            )

        return self._logits(self._hidden(tokens, attend))

    def prefill(
        self,
        tokens: jax.Array,
        lengths: jax.Array,
        cache: PagedCache,
        *,
        all_positions: bool = False,
    ) -> tuple[jax.Array, PagedCache]:
        """A full causal pass that stores keys and values from position 0 on.

        Args:
          tokens: (batch, time) int32, padded on the right; any id serves as padding.
          lengths: (batch,) int32, 1 to time and to the cache's capacity.
          cache: of `batch` sequences; what it held is overwritten.
          all_positions: logits of every token instead of each row's last.

        Returns:
          Logits float32 (batch, vocab_size), or (batch, time, vocab_size) of all positions, and the
          cache.
        """
        positions = _positions(tokens)
        slots = cache.slots(positions, positions < lengths[:, None])
        angles = self._angles(positions)
        pages: list[Pages] = []

        def attend(
            layer: int, attention: Attention, q: jax.Array, k: jax.Array, v: jax.Array, x: jax.Array
        ) -> jax.Array:
            q, k = attention.rotate(q, k, angles)
            pages.append(append(cache.pages[layer], k, v, slots))
            return attention.add_output(jq.causal_attention(q, k, v, lengths), x)

        x = self._hidden(tokens, attend)
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
          active: bool (batch,), None for all; the other sequences are left as they are and their
            logits mean nothing.

        Returns:
          Logits float32 (batch, vocab_size), and the cache.
        """
        positions = cache.context_lens[:, None]
        active = jnp.ones(token.shape, bool) if active is None else active
        slots = cache.slots(positions, active[:, None])
        lens = cache.context_lens + active
        angles = self._angles(positions)
        pages: list[Pages] = []

        def attend(
            layer: int, attention: Attention, q: jax.Array, k: jax.Array, v: jax.Array, x: jax.Array
        ) -> jax.Array:
            q, updated = attention.rotate_and_append(q, k, v, angles, cache.pages[layer], slots)
            pages.append(updated)
            return attention.add_paged(q, updated, cache.block_tables, lens, x)

        x = self._hidden(token[:, None], attend)
        return self._logits(x[:, 0]), dataclasses.replace(cache, pages=pages, context_lens=lens)

    def _angles(self, positions: jax.Array) -> Angles:
        return rope.angles(positions, self.rope_frequencies.get_value())

    def _hidden(self, tokens: jax.Array, attend: Attend) -> jax.Array:
        x = jq.embedding(tokens, self.embedding.get_value())
        for layer, block in enumerate(self.blocks):
            with jax.named_scope(
                f"layer{layer}"
            ):  # shows in profiles and in XLA's names of launches
                x = block(x, layer, attend)
        return x

    def _logits(self, x: jax.Array) -> jax.Array:
        if self.output is not None and not _are_linear(self.output):
            return self.output(self.norm(x))
        weight, bias = (
            (self.embedding, None)
            if self.output is None
            else (self.output.weight, self.output.bias)
        )
        return jq.rms_norm_matmul(
            x,
            self.norm.weight.get_value(),
            weight.get_value(),
            eps=self.norm.eps,
            bias=None if bias is None else bias.get_value(),
        )


def _positions(tokens: jax.Array) -> Any:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
