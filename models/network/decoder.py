"""Defines the Decoder: a tree of Flax NNX modules whose weights stay packed.

Prefill, extend and decode differ only in the cache that each layer gets. An attention layer gets
keys and values: `Fresh` (of a whole prompt) or `Paged` (in a KV cache). A recurrent layer gets its
state: `Chunk` (of several tokens) or `Step` (of one token).
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

from ..config import Config, rope
from ..kv_cache import PagedCache
from ..kv_cache.shapes import window_pages
from .layers import (
    Chunk,
    DecoderLayer,
    Fresh,
    Head,
    LayerCache,
    Linear,
    Norm,
    Paged,
    PerLayerEmbedding,
    Step,
    linear,
)
from .rows import last_tokens


@dataclasses.dataclass(eq=False, repr=False)
class RopeDivisors(nnx.Module):
    """Divisors of rope frequencies, (rope_dim / 2,) each; None if absent.

    Either `all` applies to every context length, or `long` and `short` depend on it.
    """

    all: nnx.Variable[Array] | None = None
    long: nnx.Variable[Array] | None = None
    short: nnx.Variable[Array] | None = None


@dataclasses.dataclass(eq=False, repr=False)
class Decoder(nnx.Module):
    """A decoder-only transformer of the llama family.

    Attributes:
      embedding: (vocab_size, hidden_size), packed or float.
      output: projection to logits; None if it is tied to the embedding.
      rope_frequencies: (rope_dim / 2,) for each of the config's ropes. If the first rope has other
        frequencies in long contexts, these come last.
      rope_divisors: divisors that `rope_frequencies` include; kept for saving.
      per_layer: per-layer embeddings; None if absent.
      head: classification head of a reranker; None if absent.
    """

    config: Config
    embedding: nnx.Variable[Any]
    layers: nnx.List[DecoderLayer]
    norm: Norm
    output: Linear | None
    rope_frequencies: nnx.List[nnx.Variable[Array]]
    rope_divisors: RopeDivisors
    per_layer: PerLayerEmbedding | None = None
    head: Head | None = None

    def __call__(self, tokens: Array, lengths: Array | None = None) -> Array:
        """Full causal pass: tokens (batch, time) int32 -> logits (batch, time, vocab_size) float32.

        lengths: int32 (batch,), tokens of each row before right padding; None means no padding.
        """
        return self.logits(self.vectors(tokens, lengths))

    def vectors(self, tokens: Array, lengths: Array | None = None) -> Array:
        """Like `__call__`, but returns hidden states (batch, time, hidden_size) before `logits`."""
        if lengths is None:
            lengths = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)

        def layer_cache(layer: int, **options: Any) -> LayerCache:
            if self._is_recurrent(layer):
                return Chunk(lengths)
            return Fresh(lengths=lengths, **options)

        positions = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
        return self._hidden(tokens, positions, layer_cache, tokens.shape[1])[0]

    def prefill(self, tokens: Array, lengths: Array, cache: PagedCache) -> tuple[Array, PagedCache]:
        """Runs a causal pass over whole prompts, and stores their keys and values in the cache.

        Args:
          tokens: (batch, time) int32, padded on the right with any id.
          lengths: (batch,) int32, at most time and the cache's capacity. A sequence of length 0
            keeps its cache, and its logits are unspecified.
          cache: cache of `batch` sequences; new tokens start at position 0 and overwrite it.

        Returns:
          Logits of each row's last token, float32 (batch, vocab_size), and the cache.
        """
        x, cache = self.prefill_vectors(tokens, lengths, cache)
        return self.logits(last_tokens(x, lengths)), cache

    def prefill_vectors(
        self, tokens: Array, lengths: Array, cache: PagedCache, given: Array | None = None
    ) -> tuple[Array, PagedCache]:
        """Like `prefill`, but returns the hidden states (batch, time, hidden_size) of all tokens.

        given: input of the first layer, (batch, time, hidden_size); None means the embeddings of
        `tokens`.
        """
        positions = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
        slots = {
            window: cache.slots(positions, cache.kept(positions, lengths, window), tables)
            for window, tables in cache.tables(self.config).items()
        }

        def layer_cache(layer: int, **options: Any) -> LayerCache:
            if self._is_recurrent(layer):
                return Chunk(lengths, state=cache.states[layer])
            window, pages = self.config.window_of(layer), cache.pages[layer]
            return Fresh(lengths=lengths, slots=slots[window], pages=pages, **options)

        x, after = self._hidden(tokens, positions, layer_cache, cache.context, given)
        context_lens = jnp.where(lengths > 0, lengths, cache.context_lens)
        return x, self._stored(cache, after, context_lens)

    def extend(
        self, tokens: Array, lengths: Array, cache: PagedCache, *, every: bool = True
    ) -> tuple[Array, PagedCache]:
        """Runs new tokens of the sequences of a cache, such as the next chunk of a prompt.

        Stores their keys and values after those in the cache.

        `jq.paged_attention` reads the pages once for many tokens of a chunk.

        Args:
          tokens: (batch, time) int32, padded on the right. Windowed layers limit time to the
            `ahead` that the cache was created with.
          lengths: (batch,) int32, 0 to time: new tokens of each sequence.
          cache: must have room for the tokens.
          every: False computes only the logits of each sequence's last token.

        Returns:
          Logits float32 (batch, time, vocab_size), or (batch, vocab_size), and the cache.

        Raises:
          ValueError: more tokens at a time than windowed layers have room for.
        """
        x, cache = self.extend_vectors(tokens, lengths, cache)
        return self.logits(x if every else last_tokens(x, lengths)), cache

    def extend_vectors(
        self, tokens: Array, lengths: Array, cache: PagedCache, given: Array | None = None
    ) -> tuple[Array, PagedCache]:
        """Like `extend`, but returns hidden states; `given` is as in `prefill_vectors`."""
        x, after = self._continued(tokens, lengths, cache, given)
        return x, self._stored(cache, after, cache.context_lens + lengths)

    def try_tokens(
        self, tokens: Array, lengths: Array, cache: PagedCache
    ) -> tuple[Array, Callable[[Array], PagedCache]]:
        """Like `extend_vectors`, for draft tokens, of which the caller accepts the first few later.

        Returns:
          Hidden states, and a function that maps the number of accepted tokens of each sequence,
          int32 (batch,), to the cache with only these tokens.
        """
        x, after = self._continued(tokens, lengths, cache, trial=True)

        def accepted(counts: Array) -> PagedCache:
            caches: list[LayerCache] = []
            for layer, trial in zip(self.layers, after, strict=True):
                mixer: Any = layer.mixer
                caches.append(mixer.accepted(trial, counts) if isinstance(trial, Chunk) else trial)
            return self._stored(cache, caches, cache.context_lens + counts)

        return x, accepted

    def _continued(
        self,
        tokens: Array,
        lengths: Array,
        cache: PagedCache,
        given: Array | None = None,
        *,
        trial: bool = False,
    ) -> tuple[Array, list[LayerCache]]:
        """Runs all layers on tokens that continue a cache.

        Returns the last layer's hidden states (batch, time, hidden_size), and each layer's cache
        after the pass. trial: the tokens are drafts.
        """
        batch, time = tokens.shape
        self._check_room(time, cache)
        steps = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
        valid, first = steps < lengths[:, None], cache.context_lens
        positions = first[:, None] + steps
        tables = cache.tables(self.config)
        slots = {window: cache.slots(positions, valid, table) for window, table in tables.items()}

        def layer_cache(layer: int, **options: Any) -> LayerCache:
            if self._is_recurrent(layer):
                return Chunk(lengths, first, cache.states[layer], trial)
            window, pages = self.config.window_of(layer), cache.pages[layer]
            options |= {"slots": slots[window], "block_tables": tables[window]}
            return Paged(pages=pages, lens=first + lengths, lengths=lengths, **options)

        flat = tokens.reshape(-1), positions.reshape(-1)
        given = None if given is None else given.reshape(batch * time, -1)
        x, after = self._hidden(*flat, layer_cache, cache.context, given)
        return x.reshape(batch, time, -1), after

    def decode(
        self, token: Array, cache: PagedCache, active: Array | None = None
    ) -> tuple[Array, PagedCache]:
        """Runs one decode step: stores one token per sequence and predicts the next.

        Args:
          token: (batch,) int32, the last token of each sequence, not stored yet.
          cache: must have room for one more token in every active sequence.
          active: bool (batch,), which sequences to run; None means all. Inactive sequences keep
            their cache, and their logits are unspecified.

        Returns:
          Logits float32 (batch, vocab_size), and the cache.
        """
        x, cache = self.decode_vectors(token, cache, active)
        return self.logits(x), cache

    def decode_vectors(
        self,
        token: Array,
        cache: PagedCache,
        active: Array | None = None,
        given: Array | None = None,
    ) -> tuple[Array, PagedCache]:
        """Like `decode`, but returns hidden states (batch, hidden_size).

        given: input of the first layer, (batch, hidden_size); None means the embeddings of `token`.
        """
        positions = cache.context_lens
        active = jnp.ones(token.shape, bool) if active is None else active
        tables, lens = cache.tables(self.config), positions + active.astype(jnp.int32)
        slots = {
            window: cache.slots(positions[:, None], active[:, None], of_window)
            for window, of_window in tables.items()
        }

        def layer_cache(layer: int, **options: Any) -> LayerCache:
            if self._is_recurrent(layer):
                return Step(jnp.where(active, positions, -1), cache.states[layer])
            window, pages = self.config.window_of(layer), cache.pages[layer]
            options |= {"slots": slots[window], "block_tables": tables[window]}
            return Paged(pages=pages, lens=lens, **options)

        x, after = self._hidden(token, positions, layer_cache, cache.context, given)
        return x, self._stored(cache, after, lens)

    def _is_recurrent(self, layer: int) -> bool:
        return self.config.mixer_of(layer) != "attention"

    def _stored(
        self, cache: PagedCache, after: Sequence[LayerCache], context_lens: Array
    ) -> PagedCache:
        """Returns the cache with the updated pages and states.

        after: each layer's cache after the pass.
        """
        return dataclasses.replace(
            cache,
            pages=[
                kv.pages if isinstance(kv, Fresh | Paged) and pages else ()
                for kv, pages in zip(after, cache.pages, strict=True)
            ],
            states=[m.state if isinstance(m, Chunk | Step) else () for m in after],
            context_lens=context_lens,
        )

    def _check_room(self, time: int, cache: PagedCache) -> None:
        """Raises ValueError if `time` new tokens exceed what windowed layers have pages for.

        Later tokens would overwrite pages that earlier ones still read. Whoever shares a pool of
        pages sees to it that block tables name enough of them.
        """
        if cache.shared_context is not None:
            return
        size, sequences = cache.page_size, cache.context_lens.shape[0]
        for layer, pages in enumerate(cache.pages):
            window = self.config.window_of(layer)
            if pages and window is not None:
                of_each = pages[0].shape[0] // sequences
                if of_each * size < min(cache.capacity, (window_pages(window, size, time)) * size):
                    raise ValueError(
                        f"tokens has time={time}; windowed layers have no room for as many at a "
                        "time: create the cache with ahead=time"
                    )

    def _hidden(
        self,
        tokens: Array,
        positions: Array,
        layer_cache: Callable[..., LayerCache],
        context: int,
        given: Array | None = None,
    ) -> tuple[Array, list[LayerCache]]:
        """Runs all layers; returns the last hidden states, and each layer's cache after the pass.

        layer_cache: function (layer, rotation=, temperature=) -> the layer's cache before the pass.
        context: maximum tokens of a sequence. given: input of the first layer; None means the
        embeddings of `tokens`.
        """
        after: list[LayerCache] = []
        config = self.config
        rotations, temperature = self._rotations(positions, context), self._temperature(positions)
        x = self.embedded(tokens) if given is None else given
        parts = None if self.per_layer is None else self.per_layer(tokens, x)
        # projections whose weights each layer's last kernel prefetches
        prefetch = [layer.first for layer in list(self.layers)[1:]] + [self._following]
        for i, layer in enumerate(self.layers):
            rotation, source = rotations[config.rope_of(i)], config.kv_layer_of(i)
            before = (
                layer_cache(i, rotation=rotation, temperature=temperature)
                if source == i
                else after[source]
            )
            with jax.named_scope(f"layer{i}"):  # shown in profiles and in XLA's kernel names
                part = None if parts is None else parts[..., i, :]
                x, updated = layer(x, before, part, prefetch[i])
            after.append(updated)
        return x, after

    def _rotations(self, positions: Array, context: int) -> list[rope.Rotation]:
        """Returns rotary cosines and sines at `positions`, one Rotation per rope of the config."""
        config, tables = self.config, [f.get_value() for f in self.rope_frequencies]
        if len(tables) > len(config.ropes):
            *tables, long = tables
            if rope.is_long(context, config.original_context or config.context_length):
                tables[0] = long
        rotations = []
        for table, kind in zip(tables, config.ropes, strict=True):
            angles = rope.angles(positions, table, rope.magnitude(kind))
            rotations.append(rope.Rotation(*angles, config.interleaved_rope))
        return rotations

    def _temperature(self, positions: Array) -> Array | None:
        """Returns factors of the queries: 1 + scale * log(1 + floor(position / original context)).

        None if the config has no temperature scale.
        """
        scale, config = self.config.temperature_scale, self.config
        if not scale:
            return None
        original = config.original_context or config.context_length
        return 1 + scale * jnp.log1p((positions // original).astype(jnp.float32))

    def embedded(self, tokens: Array) -> Array:
        """Returns the scaled embeddings (..., hidden_size) of tokens int32 (...)."""
        x = jq.embedding(tokens, self.embedding)
        return x if self.config.embedding_scale is None else x * self.config.embedding_scale

    @property
    def _output(self) -> Linear:
        """Projection of hidden states to logits."""
        return self.output or Linear(self.embedding.get_value())

    @property
    def _following(self) -> Sequence[Linear]:
        """Projections after the last layer."""
        return [self._output]

    def logits(self, x: Array) -> Array:
        """Returns logits float32 (..., vocab_size) of hidden states (..., hidden_size)."""
        logits, cap = linear(x, self._output, norm=self.norm)[0], self.config.final_soft_cap
        if self.config.logit_scale is not None:
            logits = logits * self.config.logit_scale
        return logits if cap is None else cap * jnp.tanh(logits / cap)
