"""Layers of a file that predict further tokens (multi-token prediction): drafts of its own.

Such a layer gets the trunk's normalized vector of a token and the embedding of the token behind it,
and gives the vector that the token behind both is predicted from
(https://arxiv.org/abs/2412.19437, section 2.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from jax_q4k import QuantizedArray

from ...config import Config
from ...kv_cache import PagedCache
from ...network.rows import last_tokens

if TYPE_CHECKING:
    from ...network.decoder import Decoder


@dataclasses.dataclass(frozen=True, eq=False)
class NextTokens:
    """The layer behind a model's last, as its draft model.

    Attributes:
      config: that of a decoder of this layer alone.
      weights: GGUF's names -> its tensors, the layer's as those of `blk.0`.
      merge: weights and the trunk's modules -> the layer's.
      tokens: of a draft, of which the layer predicts one after another; None: as many as pay.
    """

    config: Config
    weights: Mapping[str, QuantizedArray | jax.Array]
    merge: Callable[[Mapping[str, Any], Decoder], Drafter]
    tokens: int | None = None

    def drafter(self, weights: Mapping[str, Any], trunk: Decoder) -> Drafter:
        """The layer with `weights`, which may be tracers, beside the trunk's modules."""
        return self.merge(weights, trunk)


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A layer of further tokens with its weights.

    Its cache holds a token's pair at the token's place: its vector, and the token behind it.

    Attributes:
      decoder: of the layer alone, with the head.
      projection: of the embedding's vector and the trunk's, behind each other.
    """

    decoder: Decoder
    projection: Any
    embedding_norm: Any
    vector_norm: Any

    def begin(
        self, tokens: Array, vectors: Array, lengths: Array, cache: PagedCache
    ) -> tuple[Array, PagedCache]:
        """A prompt's pairs: tokens int32 (batch, time), vectors (batch, time, hidden_size).

        Returns the normalized vector behind each row's last pair (batch, hidden_size), and a cache.
        """
        given = self._given(tokens, vectors)
        x, cache = self.decoder.prefill_vectors(tokens, lengths, cache, given)
        return self.decoder.norm(last_tokens(x, lengths)), cache

    def follow(
        self, tokens: Array, vectors: Array, lengths: Array, cache: PagedCache
    ) -> tuple[Array, PagedCache]:
        """As `begin`, of pairs that follow those of the cache; of rows without, meaningless."""
        given = self._given(tokens, vectors)
        x, cache = self.decoder.extend_vectors(tokens, lengths, cache, given)
        return self.decoder.norm(last_tokens(x, lengths)), cache

    def drafts(
        self, vector: Array, cache: PagedCache, count: int, active: Array
    ) -> tuple[Array, PagedCache]:
        """The likeliest tokens (batch, count), behind the vector (batch, hidden_size) of the last.

        The cache that is returned has the same pairs as before, its pages updated in place.
        """
        tokens, lens = [], cache.context_lens
        for i in range(count):
            tokens.append(jnp.argmax(self._logits(vector), axis=-1).astype(jnp.int32))
            if i + 1 < count:
                given = self._given(tokens[-1], vector)
                x, cache = self.decoder.decode_vectors(tokens[-1], cache, active, given)
                vector = self.decoder.norm(x)
        return jnp.stack(tokens, axis=1), dataclasses.replace(cache, context_lens=lens)

    def _given(self, tokens: Array, vectors: Array) -> Array:
        embedded = self.embedding_norm(self.decoder.embedded(tokens))
        both = jnp.concatenate([embedded, self.vector_norm(vectors)], axis=-1)
        return self.projection(both)

    def _logits(self, vector: Array) -> Array:
        """Logits of a vector that is normalized."""
        from ...network.layers import Linear

        return (self.decoder.output or Linear(self.decoder.embedding.get_value()))(vector)
