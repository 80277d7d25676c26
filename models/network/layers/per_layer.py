"""What layers get of a token's embedding beside the vectors that go through all (Gemma 4)."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx
from jax import Array

import jax_q4k as jq

from .linear import Linear, Norm, RMSNorm, linear
from .mlp import activate


@dataclasses.dataclass(eq=False, repr=False)
class PerLayerEmbedding(nnx.Module):
    """Every layer's part of a token's embedding, of a table of its own and of the embedding itself.

    Attributes:
      embedding: (vocab_size, layers * per_layer_size), packed or float.
      projection: hidden_size -> layers * per_layer_size.
      norm: of each layer's part of the projection.
    """

    embedding: nnx.Variable[Any]
    projection: Linear
    norm: RMSNorm

    def __call__(self, tokens: Array, x: Array) -> Array:
        """(..., layers, per_layer_size), of tokens (...) and embeddings (..., hidden_size)."""
        size = self.norm.weight.shape[0]
        looked_up = jq.embedding(tokens, self.embedding) * size**0.5
        (projected,) = linear(x, self.projection)
        shape = *x.shape[:-1], -1, size
        projected = self.norm((projected * x.shape[-1] ** -0.5).reshape(shape))
        return (projected + looked_up.reshape(shape)) * 2**-0.5


@dataclasses.dataclass(eq=False, repr=False)
class PerLayer(nnx.Module):
    """x + post_norm(output(activation(gate(x)) * given))."""

    gate: Linear
    output: Linear
    post_norm: Norm
    activation: str

    def __call__(self, x: Array, given: Array) -> Array:
        """x (..., hidden_size), given (..., per_layer_size) -> (..., hidden_size)."""
        h = activate(self.activation, *linear(x, self.gate)) * given
        return x + self.post_norm(linear(h, self.output)[0])
