"""The decoder: a tree of Flax NNX modules whose weights stay packed.

Its passes differ only in each layer's memory: what attention appends to and attends to, `Fresh`
keys and values or `Paged` ones; and the state that others go on from, with a `Chunk` of tokens or
one `Step`.
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
    KV,
    Chunk,
    DecoderLayer,
    Fresh,
    Linear,
    Memory,
    Norm,
    Paged,
    PerLayerEmbedding,
    Step,
    linear,
)
from .rows import last_tokens


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
      per_layer: what layers get of a token's embedding; None: nothing.
    """

    config: Config
    embedding: nnx.Variable[Any]
    layers: nnx.List[DecoderLayer]
    norm: Norm
    output: Linear | None
    rope_frequencies: nnx.List[nnx.Variable[Array]]
    rope_divisors: RopeDivisors
    per_layer: PerLayerEmbedding | None = None

    def __call__(self, tokens: Array, lengths: Array | None = None) -> Array:
        """Full causal pass: tokens (batch, time) int32 -> logits (batch, time, vocab_size) float32.

        lengths: int32 (batch,), where rows are padded on the right; None: no padding.
        """
        return self.logits(self.vectors(tokens, lengths))

    def vectors(self, tokens: Array, lengths: Array | None = None) -> Array:
        """As a call, of vectors (batch, time, hidden_size) that `logits` makes logits of."""
        if lengths is None:
            lengths = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)

        def memory(layer: int, **options: Any) -> KV | Memory:
            if self._is_recurrent(layer):
                return Chunk(lengths)
            return Fresh(lengths=lengths, **options)

        positions = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
        return self._hidden(tokens, positions, memory, tokens.shape[1])[0]

    def prefill(self, tokens: Array, lengths: Array, cache: PagedCache) -> tuple[Array, PagedCache]:
        """A full causal pass that stores keys and values from position 0 on.

        Args:
          tokens: (batch, time) int32, padded on the right; any id serves as padding.
          lengths: (batch,) int32, up to time and to the cache's capacity; 0: the sequence stays as
            it is, and gets meaningless logits.
          cache: of `batch` sequences; what it held of the others is overwritten.

        Returns:
          Logits of each row's last token, float32 (batch, vocab_size), and the cache.
        """
        x, cache = self.prefill_vectors(tokens, lengths, cache)
        return self.logits(last_tokens(x, lengths)), cache

    def prefill_vectors(
        self, tokens: Array, lengths: Array, cache: PagedCache, given: Array | None = None
    ) -> tuple[Array, PagedCache]:
        """As `prefill`, of vectors (batch, time, hidden_size) that `logits` makes logits of.

        given: the vectors that the first layer gets; None: the tokens' embeddings.
        """
        positions = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
        slots = {
            window: cache.slots(positions, cache.kept(positions, lengths, window), tables)
            for window, tables in cache.tables(self.config).items()
        }

        def memory(layer: int, **options: Any) -> KV | Memory:
            if self._is_recurrent(layer):
                return Chunk(lengths, state=cache.states[layer])
            window, pages = self.config.window_of(layer), cache.pages[layer]
            return Fresh(lengths=lengths, slots=slots[window], pages=pages, **options)

        x, after = self._hidden(tokens, positions, memory, cache.capacity, given)
        context_lens = jnp.where(lengths > 0, lengths, cache.context_lens)
        return x, self._stored(cache, after, context_lens)

    def extend(
        self, tokens: Array, lengths: Array, cache: PagedCache, *, every: bool = True
    ) -> tuple[Array, PagedCache]:
        """A pass over tokens that continue the sequences of a cache, such as pieces of a prompt.

        On a GPU a piece reads pages as `jq.paged_attention` says: once for many of its tokens.
        Otherwise every token reads its sequence's pages by itself: then pieces of up to some
        hundred tokens are best.

        Args:
          tokens: (batch, time) int32, padded on the right. Windowed layers take as many as the
            cache was created for, `ahead`.
          lengths: (batch,) int32, 0 to time: tokens of each sequence.
          cache: with room for them.
          every: False: only each sequence's last token gets logits.

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
        """As `extend`, of vectors as `prefill_vectors` has them."""
        x, after = self._continued(tokens, lengths, cache, given)
        return x, self._stored(cache, after, cache.context_lens + lengths)

    def try_tokens(
        self, tokens: Array, lengths: Array, cache: PagedCache
    ) -> tuple[Array, Callable[[Array], PagedCache]]:
        """As `extend_vectors`, of tokens of which only the first may stay.

        Returns:
          The vectors, and a function: how many of each sequence's tokens stay, int32 (batch,), to
          the cache with these.
        """
        x, after = self._continued(tokens, lengths, cache, trial=True)

        def accepted(counts: Array) -> PagedCache:
            kept: list[KV | Memory] = []
            for layer, memory in zip(self.layers, after, strict=True):
                mixer: Any = layer.mixer
                kept.append(mixer.accepted(memory, counts) if isinstance(memory, Chunk) else memory)
            return self._stored(cache, kept, cache.context_lens + counts)

        return x, accepted

    def _continued(
        self,
        tokens: Array,
        lengths: Array,
        cache: PagedCache,
        given: Array | None = None,
        *,
        trial: bool = False,
    ) -> tuple[Array, list[KV | Memory]]:
        """The last layer's vectors (batch, time, hidden_size), and each layer's memory."""
        batch, time = tokens.shape
        self._check_ahead(time, cache)
        steps = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
        valid, first = steps < lengths[:, None], cache.context_lens
        positions = first[:, None] + steps
        tables = cache.tables(self.config)
        slots = {window: cache.slots(positions, valid, table) for window, table in tables.items()}

        def memory(layer: int, **options: Any) -> KV | Memory:
            if self._is_recurrent(layer):
                return Chunk(lengths, first, cache.states[layer], trial)
            window, pages = self.config.window_of(layer), cache.pages[layer]
            options |= {"slots": slots[window], "block_tables": tables[window]}
            return Paged(pages=pages, lens=first + lengths, lengths=lengths, **options)

        flat = tokens.reshape(-1), positions.reshape(-1)
        given = None if given is None else given.reshape(batch * time, -1)
        x, after = self._hidden(*flat, memory, cache.capacity, given)
        return x.reshape(batch, time, -1), after

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
        x, cache = self.decode_vectors(token, cache, active)
        return self.logits(x), cache

    def decode_vectors(
        self,
        token: Array,
        cache: PagedCache,
        active: Array | None = None,
        given: Array | None = None,
    ) -> tuple[Array, PagedCache]:
        """As `decode`, of vectors (batch, hidden_size), as `prefill_vectors` has them."""
        positions = cache.context_lens
        active = jnp.ones(token.shape, bool) if active is None else active
        tables, lens = cache.tables(self.config), positions + active.astype(jnp.int32)
        slots = {
            window: cache.slots(positions[:, None], active[:, None], of_window)
            for window, of_window in tables.items()
        }

        def memory(layer: int, **options: Any) -> KV | Memory:
            if self._is_recurrent(layer):
                return Step(jnp.where(active, positions, -1), cache.states[layer])
            window, pages = self.config.window_of(layer), cache.pages[layer]
            options |= {"slots": slots[window], "block_tables": tables[window]}
            return Paged(pages=pages, lens=lens, **options)

        x, after = self._hidden(token, positions, memory, cache.capacity, given)
        return x, self._stored(cache, after, lens)

    def _is_recurrent(self, layer: int) -> bool:
        return self.config.mixer_of(layer) != "attention"

    def _stored(
        self, cache: PagedCache, after: Sequence[KV | Memory], context_lens: Array
    ) -> PagedCache:
        """The cache with what layers have after a pass."""
        return dataclasses.replace(
            cache,
            pages=[
                memory.pages if isinstance(memory, Fresh | Paged) and pages else ()
                for memory, pages in zip(after, cache.pages, strict=True)
            ],
            states=[m.state if isinstance(m, Chunk | Step) else () for m in after],
            context_lens=context_lens,
        )

    def _check_ahead(self, time: int, cache: PagedCache) -> None:
        """Raises ValueError if later tokens would take the pages that earlier ones still see."""
        size, sequences = cache.page_size, cache.context_lens.shape[0]
        for layer, pages in enumerate(cache.pages):
            window = self.config.window_of(layer)
            if pages and window is not None:
                own = pages[0].shape[0] // sequences
                if own * size < min(cache.capacity, (window_pages(window, size, time)) * size):
                    raise ValueError(
                        f"tokens has time={time}; windowed layers have no room for as many at a "
                        "time: create the cache with ahead=time"
                    )

    def _hidden(
        self,
        tokens: Array,
        positions: Array,
        memory: Callable[..., KV | Memory],
        capacity: int,
        given: Array | None = None,
    ) -> tuple[Array, list[KV | Memory]]:
        """The last layer's vectors, and each layer's memory after it.

        memory(layer, rotation=, temperature=). capacity: tokens that a sequence may have. given:
        the first layer's vectors; None: embeddings.
        """
        after: list[KV | Memory] = []
        config = self.config
        rotations, temperature = self._rotations(positions, capacity), self._temperature(positions)
        x = self.embedded(tokens) if given is None else given
        parts = None if self.per_layer is None else self.per_layer(tokens, x)
        # what each layer's last launch asks for
        ahead = [layer.first for layer in list(self.layers)[1:]] + [[self._output]]
        for i, layer in enumerate(self.layers):
            rotation, source = rotations[config.rope_of(i)], config.kv_layer_of(i)
            held = (
                memory(i, rotation=rotation, temperature=temperature)
                if source == i
                else after[source]
            )
            with jax.named_scope(f"layer{i}"):  # in profiles, and in XLA's names of launches
                part = None if parts is None else parts[..., i, :]
                x, memory_after = layer(x, held, part, ahead[i])
            after.append(memory_after)
        return x, after

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

    def embedded(self, tokens: Array) -> Array:
        """The vectors (..., hidden_size) of tokens int32 (...)."""
        x = jq.embedding(tokens, self.embedding)
        return x if self.config.embedding_scale is None else x * self.config.embedding_scale

    @property
    def _output(self) -> Linear:
        """The projection to logits."""
        return self.output or Linear(self.embedding.get_value())

    def logits(self, x: Array) -> Array:
        """Logits float32 (..., vocab_size), of the last layer's vectors (..., hidden_size)."""
        logits, cap = linear(x, self._output, norm=self.norm)[0], self.config.final_soft_cap
        if self.config.logit_scale is not None:
            logits = logits * self.config.logit_scale
        return logits if cap is None else cap * jnp.tanh(logits / cap)
