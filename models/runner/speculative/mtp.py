"""Proposes draft tokens with a model's own multi-token-prediction (MTP) layer.

The layer's input is the main model's normalized hidden state of a token and the embedding of the
next token. Its output is the hidden state that predicts the token after both
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
    """A model's MTP layer, without modules, as the source of drafts.

    Attributes:
      config: configuration of a decoder with only this layer.
      weights: GGUF name -> tensor; the layer's tensors are named like those of `blk.0`.
      merge: function from the weights and the main model's Decoder to a Drafter.
      tokens: tokens per draft, predicted in sequence; None means a default for the device.
    """

    config: Config
    weights: Mapping[str, QuantizedArray | jax.Array]
    merge: Callable[[Mapping[str, Any], Decoder], Drafter]
    tokens: int | None = None

    def drafter(self, weights: Mapping[str, Any], trunk: Decoder) -> Drafter:
        """Builds the Drafter from `weights`, which may be tracers, and the main model's modules."""
        return self.merge(weights, trunk)


@dataclasses.dataclass(frozen=True)
class Drafter:
    """An MTP layer as modules, which predicts draft tokens.

    Its KV cache has one entry per pair of a token's hidden state and the next token, at the token's
    position.

    Attributes:
      decoder: decoder with only this layer, and the head.
      projection: projection of the concatenated embedding and hidden state to hidden_size.
    """

    decoder: Decoder
    projection: Any
    embedding_norm: Any
    vector_norm: Any

    def begin(
        self, tokens: Array, vectors: Array, lengths: Array, cache: PagedCache
    ) -> tuple[Array, PagedCache]:
        """Prefills the layer's cache with a prompt's pairs of hidden state and next token.

        tokens: int32 (batch, time), the token after each hidden state. vectors: hidden states
        (batch, time, hidden_size). lengths: (batch,), pairs per row. Returns the normalized output
        of each row's last pair, (batch, hidden_size), and the cache.
        """
        inputs = self._layer_input(tokens, vectors)
        x, cache = self.decoder.prefill_vectors(tokens, lengths, cache, inputs)
        return self.decoder.norm(last_tokens(x, lengths)), cache

    def follow(
        self, tokens: Array, vectors: Array, lengths: Array, cache: PagedCache
    ) -> tuple[Array, PagedCache]:
        """Like `begin`, for pairs that continue the cache; output is unspecified without pairs."""
        inputs = self._layer_input(tokens, vectors)
        x, cache = self.decoder.extend_vectors(tokens, lengths, cache, inputs)
        return self.decoder.norm(last_tokens(x, lengths)), cache

    def drafts(
        self, vector: Array, cache: PagedCache, count: int, active: Array
    ) -> tuple[Array, PagedCache]:
        """Predicts `count` draft tokens greedily, in sequence.

        vector: the layer's last output (batch, hidden_size). Returns the tokens (batch, count), and
        the cache with the same lengths and updated pages.
        """
        tokens, lens = [], cache.context_lens
        for i in range(count):
            tokens.append(jnp.argmax(self._logits(vector), axis=-1).astype(jnp.int32))
            if i + 1 < count:
                inputs = self._layer_input(tokens[-1], vector)
                x, cache = self.decoder.decode_vectors(tokens[-1], cache, active, inputs)
                vector = self.decoder.norm(x)
        return jnp.stack(tokens, axis=1), dataclasses.replace(cache, context_lens=lens)

    def _layer_input(self, tokens: Array, vectors: Array) -> Array:
        embedded = self.embedding_norm(self.decoder.embedded(tokens))
        both = jnp.concatenate([embedded, self.vector_norm(vectors)], axis=-1)
        return self.projection(both)

    def _logits(self, vector: Array) -> Array:
        """Returns the logits of a normalized hidden state."""
        from ...network.layers import Linear

        return (self.decoder.output or Linear(self.decoder.embedding.get_value()))(vector)
