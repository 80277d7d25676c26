"""Per-layer embeddings (Gemma 4) as Flax modules."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx
from jax import Array

import jax_q4k as jq

from .linear import Linear, Norm, RMSNorm, added, linear
from .mlp import activate


@dataclasses.dataclass(eq=False, repr=False)
class PerLayerEmbedding(nnx.Module):
    """Computes one embedding per layer from a separate table and the token's embedding.

    Attributes:
      embedding: (vocab_size, layers * per_layer_size), packed or float.
      projection: maps hidden_size to layers * per_layer_size.
      norm: norm of the projection, applied to each layer's part of it.
    """

    embedding: nnx.Variable[Any]
    projection: Linear
    norm: RMSNorm

    def __call__(self, tokens: Array, x: Array) -> Array:
        """Maps tokens (...), embeddings (..., hidden_size) to (..., layers, per_layer_size)."""
        size = self.norm.weight.shape[0]
        looked_up = jq.embedding(tokens, self.embedding) * size**0.5
        (projected,) = linear(x, self.projection)
        shape = *x.shape[:-1], -1, size
        projected = self.norm((projected * x.shape[-1] ** -0.5).reshape(shape))
        return (projected + looked_up.reshape(shape)) * 2**-0.5


@dataclasses.dataclass(eq=False, repr=False)
class PerLayer(nnx.Module):
    """Adds an embedding e per layer: x + post_norm(output(activation(gate(x)) * e))."""

    gate: Linear
    output: Linear
    post_norm: Norm
    activation: str

    def __call__(self, x: Array, embeddings: Array) -> Array:
        """Maps x (..., hidden_size) and embeddings (..., per_layer_size) to (..., hidden_size)."""
        h = activate(self.activation, *linear(x, self.gate)) * embeddings
        return added(x, linear(h, self.output)[0], self.post_norm, None)
