"""Short causal convolution with input and output gates, as a token mixer (LFM2)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax import Array

from .linear import Linear, Norm, Prefetch, linear
from .recurrent import Chunk, RecurrentCache


@dataclasses.dataclass(eq=False, repr=False)
class ShortConvolution(nnx.Module):
    """Token mixer that computes output(c * convolution(b * v)), where b, c, v = input(norm(x)).

    Attributes:
      taps: (hidden_size, width), convolution weights of each channel; the last column is for the
        current token.
      bias: (hidden_size,), added to the convolution's output; None if absent.
    """

    input: Linear
    taps: nnx.Variable[Array]
    output: Linear
    bias: nnx.Variable[Array] | None = None
    norm: Norm | None = None

    @property
    def first(self) -> list[Linear]:
        """The input projection."""
        return [self.input]

    def __call__(
        self,
        x: Array,
        cache: RecurrentCache,
        residual: Array | None = None,
        prefetch: Prefetch = (),
    ) -> tuple[Array, RecurrentCache]:
        """Returns residual + convolution(x), (..., hidden_size), and the updated cache.

        residual: x if None. prefetch: projections that run next.
        """
        residual = x if residual is None else residual
        (projected,) = linear(x, self.input, norm=self.norm, prefetch=[self.output])
        input_gate, output_gate, value = jnp.split(projected, 3, axis=-1)
        gated = input_gate * value
        rows = cache.rows(gated) if isinstance(cache, Chunk) else gated
        y, ring = cache.convolved(rows, self.taps.get_value())
        if self.bias is not None:
            y = y + self.bias.get_value().reshape((1,) * (y.ndim - 1) + (-1,))
        y = output_gate * y.reshape(gated.shape).astype(gated.dtype)
        if ring is not None:
            cache = cache.with_state((ring,), rows)
        return linear(y, self.output, residual=residual, prefetch=prefetch)[0], cache

    def accepted(self, trial: Chunk, lengths: Array) -> Chunk:
        """Returns the cache after the accepted draft tokens of a trial: the first `lengths`."""
        cache, (gated,) = trial.shortened(lengths), trial.inputs
        return cache.with_state((cache.ring(gated, self.taps.get_value().shape[1]),))
