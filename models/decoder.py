"""The decoder: a tree of Flax NNX modules whose weights stay packed.

Its passes differ only in what each layer's attention appends to and attends to: `Fresh` keys and
values, or `Paged` ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import jax_q4k as jq

from . import rope
from .config import Config
from .kv_cache import PagedCache, Pages
from .layers import KV, DecoderLayer, Fresh, Linear, Paged, RMSNorm, linear


@dataclasses.dataclass(eq=False, repr=False)
class Decoder(nnx.Module):
    """A decoder-only transformer of the llama family.

    Attributes:
      embedding: (vocab_size, hidden_size), packed or float.
      output: None where it is tied to the embedding.
      rope_frequencies: (rope_dim / 2,) of each of the config's ropes.
      rope_divisors: (rope_dim / 2,) that went into them, kept so that a saved file holds them.
    """

    config: Config
    embedding: nnx.Variable[Any]
    layers: nnx.List[DecoderLayer]
    norm: RMSNorm
    output: Linear | None
    rope_frequencies: nnx.List[nnx.Variable[Array]]
    rope_divisors: nnx.Variable[Array] | None = None

    def __call__(self, tokens: Array, lengths: Array | None = None) -> Array:
        """Full causal pass: tokens (batch, time) int32 -> logits (batch, time, vocab_size) float32.

        lengths: int32 (batch,), where rows are padded on the right; None: no padding.
        """
        if lengths is None:
            lengths = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
        kv = functools.partial(Fresh, lengths=lengths)
        positions = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
        return self._logits(self._hidden(tokens, positions, kv, [()] * len(self.layers))[0])

    def prefill(self, tokens: Array, lengths: Array, cache: PagedCache) -> tuple[Array, PagedCache]:
        """A full causal pass that stores keys and values from position 0 on.

        Args:
          tokens: (batch, time) int32, padded on the right; any id serves as padding.
          lengths: (batch,) int32, 1 to time and to the cache's capacity.
          cache: of `batch` sequences; what it held is overwritten.

        Returns:
          Logits of each row's last token, float32 (batch, vocab_size), and the cache.
        """
        positions = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
        slots = cache.slots(positions, positions < lengths[:, None])
        kv = functools.partial(Fresh, lengths=lengths, slots=slots)
        x, pages = self._hidden(tokens, positions, kv, cache.pages)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return self._logits(last), dataclasses.replace(cache, pages=pages, context_lens=lengths)

    def decode(
        self, token: Array, cache: PagedCache, active: Array | None = None
    ) -> tuple[Array, PagedCache]:
        """One step: stores one token per sequence and predicts the next.

        Args:
          token: (batch,) int32.
          cache: with room for one more token in every active sequence.
          active: bool (batch,); the others stay as they are and get meaningless logits. None: all.

        Returns:
          Logits float32 (batch, vocab_size), and the cache.
        """
        positions = cache.context_lens
        active = jnp.ones(token.shape, bool) if active is None else active
        slots = cache.slots(positions[:, None], active[:, None])
        lens = positions + active.astype(jnp.int32)
        kv = functools.partial(Paged, slots=slots, block_tables=cache.block_tables, lens=lens)
        x, pages = self._hidden(token, positions, kv, cache.pages)
        return self._logits(x), dataclasses.replace(cache, pages=pages, context_lens=lens)

    def _hidden(
        self, tokens: Array, positions: Array, kv: Callable[..., KV], pages: Sequence[Pages]
    ) -> tuple[Array, list[Pages]]:
        """The last layer's vectors, and each layer's pages after it; kv(rotation=, pages=)."""
        angles = [rope.angles(positions, f.get_value()) for f in self.rope_frequencies]
        rotations = [rope.Rotation(*a, self.config.interleaved_rope) for a in angles]
        x, updated = jq.embedding(tokens, self.embedding), []
        if self.config.embedding_scale is not None:
            x = x * self.config.embedding_scale
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layer{i}"):  # in profiles, and in XLA's names of launches
                x, after = layer(x, kv(rotation=rotations[self.config.rope_of(i)], pages=pages[i]))
            updated.append(after.pages)
        return x, updated

    def _logits(self, x: Array) -> Array:
        output = self.output or Linear(self.embedding.get_value())
        logits, cap = linear(x, output, norm=self.norm)[0], self.config.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
