"""Short causal convolution with input and output gates, as a token mixer (LFM2)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax import Array

from .linear import Ahead, Linear, Norm, linear
from .recurrent import Chunk, Memory


@dataclasses.dataclass(eq=False, repr=False)
class ShortConvolution(nnx.Module):
    """Token mixer that computes output(c * convolution(b * v)), where b, c, v = input(norm(x)).

    Attributes:
      taps: (hidden_size, width), convolution weights of each channel; the last column is for the
        current token.
    """

    input: Linear
    taps: nnx.Variable[Array]
    output: Linear
    norm: Norm | None = None

    @property
    def first(self) -> list[Linear]:
        """The input projection."""
        return [self.input]

    def __call__(
        self, x: Array, memory: Memory, residual: Array | None = None, prefetch: Ahead = ()
    ) -> tuple[Array, Memory]:
        """Returns residual + convolution(x), (..., hidden_size), and the updated memory.

        residual: x if None. prefetch: projections that run next.
        """
        residual = x if residual is None else residual
        (projected,) = linear(x, self.input, norm=self.norm, prefetch=[self.output])
        before, behind, value = jnp.split(projected, 3, axis=-1)
        given = before * value
        rows = memory.rows(given) if isinstance(memory, Chunk) else given
        y, ring = memory.convolved(rows, self.taps.get_value())
        y = behind * y.reshape(given.shape).astype(given.dtype)
        if ring is not None:
            memory = memory.kept((ring,), rows)
        return linear(y, self.output, residual=residual, prefetch=prefetch)[0], memory

    def accepted(self, trial: Chunk, lengths: Array) -> Chunk:
        """Returns the memory after the accepted draft tokens of a trial: the first `lengths`."""
        memory, (given,) = trial.shortened(lengths), trial.inputs
        return memory.kept((memory.ring(given, self.taps.get_value().shape[1]),))
