"""Programs of encoders and rerankers: pooled vectors of texts, scores of pooled vectors."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..network.rows import pooled
from .programs import Program, Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeTexts(Program):
    """Computes the vectors of texts with an encoder.

    (weights, tokens int32 (rows, time), lengths, seconds and tasks int32 (rows,)) -> float32 (rows,
    hidden_size), or (rows, time, hidden_size) without pooling. The arguments are those of
    `Encoder.encode`.

    Attributes:
      pooling: "mean", "last", "cls" or "none".
      dense: whether the dense layers after pooling apply, if there are any.
    """

    pooling: str
    dense: bool = True

    def __call__(
        self,
        weights: Weights,
        tokens: jax.Array,
        lengths: jax.Array,
        seconds: jax.Array,
        tasks: jax.Array,
    ) -> jax.Array:
        encoder: Any = self._decoder(weights)
        rows = [self._rows(array) for array in (tokens, lengths, seconds, tasks)]
        x = pooled(encoder.encode(*rows), rows[1], self.pooling)
        if self.dense and encoder.dense is not None and self.pooling != "none":
            x = encoder.dense(x)
        placement = self.network.placement
        return x if placement is None else placement.replicate_rows(x)

    def results(self, arguments: tuple[Any, ...]) -> Any:
        """Returns shapes and dtypes of the results."""
        rows, time = arguments[1].shape
        of_text = (time,) if self.pooling == "none" else ()
        shape = rows, *of_text, self.network.config.hidden_size
        return jax.ShapeDtypeStruct(shape, jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreVectors(Program):
    """Applies the classification head: (weights, vectors float32 (rows, hidden_size)) -> logits.

    The logits are float32 (rows, labels).
    """

    def __call__(self, weights: Weights, vectors: jax.Array) -> jax.Array:
        head = self._decoder(weights).head
        assert head is not None
        return head(vectors)

    def results(self, arguments: tuple[Any, ...]) -> Any:
        """Returns shapes and dtypes of the results."""
        shape = arguments[1].shape[0], self.network.config.labels
        return jax.ShapeDtypeStruct(shape, jnp.float32)
