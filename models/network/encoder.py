"""Defines the Encoder, whose tokens attend to all tokens of their text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from .decoder import Decoder
from .layers import Dense, LayerCache, Linear, Norm, Whole


@dataclasses.dataclass(eq=False, repr=False)
class Encoder(Decoder):
    """A decoder's layers with attention to all tokens, which compute vectors and no logits.

    Attributes:
      norm: None if the last layer normalizes its output.
      positions: (context_length, hidden_size), added to embeddings; None if absent.
      token_types: (token_types, hidden_size), added to embeddings; None if absent.
      embedding_norm: norm of the sum of embeddings; None if absent.
      dense: dense layers after pooling; None if absent.
    """

    norm: Norm | None  # type: ignore[assignment]
    positions: nnx.Variable[Array] | None = None
    token_types: nnx.Variable[Array] | None = None
    embedding_norm: Norm | None = None
    dense: Dense | None = None

    def encode(self, tokens: Array, lengths: Array, seconds: Array) -> Array:
        """Computes the vectors of all tokens.

        Args:
          tokens: int32 (batch, time), padded on the right with any id.
          lengths: int32 (batch,), tokens of each row before padding.
          seconds: int32 (batch,), position from which on tokens have the second token type, as
            documents after a query do.

        Returns:
          Outputs of the last norm, (batch, time, hidden_size); unspecified for padding.
        """
        config = self.config
        positions = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
        x = self.embedded(tokens)
        if self.token_types is not None:
            table = self.token_types.get_value()
            if len(table) > 1:
                is_second = positions >= seconds[:, None]
                x = x + jnp.where(is_second[..., None], table[1], table[0])
            else:
                x = x + table[0]
        if self.positions is not None:
            x = x + self.positions.get_value()[: tokens.shape[1]][None]
        x = x if self.embedding_norm is None else self.embedding_norm(x)

        def layer_cache(layer: int, **options: Any) -> LayerCache:
            rotates = not math.isinf(config.ropes[config.rope_of(layer)].factor)
            return Whole(lengths=lengths, rotates=rotates, alibi=config.kind.alibi, **options)

        x, _ = self._hidden(tokens, positions, layer_cache, tokens.shape[1], x)
        return x if self.norm is None else self.norm(x)

    @property
    def _following(self) -> Sequence[Linear]:
        return []

    def logits(self, x: Array) -> NoReturn:
        """Raises ValueError: an encoder has no logits."""
        raise ValueError(f"{self.config.architecture} is an encoder, which has no logits")
