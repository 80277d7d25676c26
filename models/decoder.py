"""The decoder: a tree of Flax NNX modules whose weights stay packed.

Its passes differ only in what each layer's attention appends to and attends to: `Fresh` keys and
values, or `Paged` ones.
"""

from __future__ import annotations

import dataclasses
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
from .layers import KV, DecoderLayer, Fresh, Linear, Norm, Paged, linear


@dataclasses.dataclass(eq=False, repr=False)
class RopeDivisors(nnx.Module):
    """Divisors of rope frequencies, (rope_dim / 2,) each, or None: of every context, or of two."""

    all: nnx.Variable[Array] | None = None
    long: nnx.Variable[Array] | None = None
    short: nnx.Variable[Array] | None = None


@dataclasses.dataclass(eq=False, repr=False)
class Decoder(nnx.Module):
    """A decoder-only transformer of the llama family.

    Attributes:
      embedding: (vocab_size, hidden_size), packed or float.
      output: None where it is tied to the embedding.
      rope_frequencies: (rope_dim / 2,) of each of the config's ropes, and behind them those of the
        first in long contexts, where they differ.
      rope_divisors: what went into them, kept so that a saved file holds it.
    """

    config: Config
    embedding: nnx.Variable[Any]
    layers: nnx.List[DecoderLayer]
    norm: Norm
    output: Linear | None
    rope_frequencies: nnx.List[nnx.Variable[Array]]
    rope_divisors: RopeDivisors

    def __call__(self, tokens: Array, lengths: Array | None = None) -> Array:
        """Full causal pass: tokens (batch, time) int32 -> logits (batch, time, vocab_size) float32.

        lengths: int32 (batch,), where rows are padded on the right; None: no padding.
        """
        if lengths is None:
            lengths = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)

        def kv(window: int | None, **options: Any) -> KV:
            return Fresh(lengths=lengths, **options)

        positions = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
        pages: list[Pages] = [()] * len(self.layers)
        return self._logits(self._hidden(tokens, positions, kv, pages, tokens.shape[1])[0])

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
        slots = {
            window: cache.slots(positions, cache.kept(positions, lengths, window), tables)
            for window, tables in cache.tables(self.config).items()
        }

        def kv(window: int | None, **options: Any) -> KV:
            return Fresh(lengths=lengths, slots=slots[window], **options)

        x, pages = self._hidden(tokens, positions, kv, cache.pages, cache.capacity)
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
        tables, lens = cache.tables(self.config), positions + active.astype(jnp.int32)
        slots = {
            window: cache.slots(positions[:, None], active[:, None], of_window)
            for window, of_window in tables.items()
        }

        def kv(window: int | None, **options: Any) -> KV:
            return Paged(slots=slots[window], block_tables=tables[window], lens=lens, **options)

        x, pages = self._hidden(token, positions, kv, cache.pages, cache.capacity)
        return self._logits(x), dataclasses.replace(cache, pages=pages, context_lens=lens)

    def _hidden(
        self,
        tokens: Array,
        positions: Array,
        kv: Callable[..., KV],
        pages: Sequence[Pages],
        capacity: int,
    ) -> tuple[Array, list[Pages]]:
        """The last layer's vectors, and each layer's pages after it.

        kv(window, rotation=, temperature=, pages=). capacity: tokens that a sequence may have.
        """
        rotations, temperature = self._rotations(positions, capacity), self._temperature(positions)
        x, updated = jq.embedding(tokens, self.embedding), []
        if self.config.embedding_scale is not None:
            x = x * self.config.embedding_scale
        for i, layer in enumerate(self.layers):
            rotation, window = rotations[self.config.rope_of(i)], self.config.window_of(i)
            options = {"rotation": rotation, "temperature": temperature, "pages": pages[i]}
            with jax.named_scope(f"layer{i}"):  # in profiles, and in XLA's names of launches
                x, after = layer(x, kv(window, **options))
            updated.append(after.pages)
        return x, updated

    def _rotations(self, positions: Array, capacity: int) -> list[rope.Rotation]:
        """The angles of positions by each of the config's ropes."""
        config, tables = self.config, [f.get_value() for f in self.rope_frequencies]
        if len(tables) > len(config.ropes):
            *tables, long = tables
            if rope.is_long(capacity, config.original_context or config.context_length):
                tables[0] = long
        rotations = []
        for table, kind in zip(tables, config.ropes, strict=True):
            angles = rope.angles(positions, table, rope.magnitude(kind))
            rotations.append(rope.Rotation(*angles, config.interleaved_rope))
        return rotations

    def _temperature(self, positions: Array) -> Array | None:
        """Factor of the queries at positions: 1 + scale * log(1 + floor(position / original))."""
        scale, config = self.config.temperature_scale, self.config
        if not scale:
            return None
        original = config.original_context or config.context_length
        return 1 + scale * jnp.log1p((positions // original).astype(jnp.float32))

    def _logits(self, x: Array) -> Array:
        output = self.output or Linear(self.embedding.get_value())
        logits, cap = linear(x, output, norm=self.norm)[0], self.config.final_soft_cap
        if self.config.logit_scale is not None:
            logits = logits * self.config.logit_scale
        return logits if cap is None else cap * jnp.tanh(logits / cap)
