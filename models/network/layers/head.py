"""Layers after pooling: the classification head of rerankers, and dense layers of embeddings."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax import Array

from .linear import Linear, Norm
from .mlp import activate


@dataclasses.dataclass(eq=False, repr=False)
class Head(nnx.Module):
    """Classification head: output(norm(activation(dense(x)))); parts may be absent.

    activation: "tanh", or a name of ACTIVATIONS.
    """

    dense: Linear | None = None
    norm: Norm | None = None
    output: Linear | None = None
    activation: str = "tanh"

    def __call__(self, x: Array) -> Array:
        """Returns the logits float32 (rows, labels) of pooled vectors (rows, hidden_size)."""
        x = x.astype(jnp.float32)
        if self.dense is not None:
            x = self.dense(x)
            x = jnp.tanh(x) if self.activation == "tanh" else activate(self.activation, x)
        x = x if self.norm is None else self.norm(x)
        return x if self.output is None else self.output(x)


@dataclasses.dataclass(eq=False, repr=False)
class Dense(nnx.Module):
    """Two dense layers, without activations."""

    first: Linear
    second: Linear

    def __call__(self, x: Array) -> Array:
        return self.second(self.first(x))
