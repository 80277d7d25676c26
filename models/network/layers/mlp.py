"""Feed-forward networks."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax import Array

import jax_q4k as jq

from .linear import Ahead, Linear, Norm, added, fusible, linear, normalized, weights_of


@dataclasses.dataclass(eq=False, repr=False)
class MLP(nnx.Module):
    """Feed-forward network: down(activation(gate(x)) * up(x)).

    Attributes:
      gate: None: there is none, down(activation(up(x))).
      norm, post_norm: of x, and of what is added to it; None: there is none.
      activation: a name of `jax_q4k.ACTIVATION_FUNCTIONS`: "silu" (SwiGLU), "gelu", the
        approximation by tanh (GeGLU), ...
      residual_scale: factor of what is added; None: 1.
    """

    gate: Linear | None
    up: Linear
    down: Linear
    norm: Norm | None = None
    post_norm: Norm | None = None
    activation: str = "silu"
    residual_scale: float | None = None

    def __post_init__(self) -> None:
        if self.activation not in (known := jq.ACTIVATION_FUNCTIONS):
            raise ValueError(f"activation={self.activation!r} must be one of {', '.join(known)}")

    @property
    def first(self) -> list[Linear]:
        """The projections of x."""
        return [self.up] if self.gate is None else [self.gate, self.up]

    def __call__(self, x: Array, residual: Array | None = None, prefetch: Ahead = ()) -> Array:
        """x (..., hidden_size) -> the residual, or x, plus the network of x.

        prefetch: projections that come behind it.
        """
        residual = x if residual is None else residual
        if self.post_norm is None and self.residual_scale is None:
            return self.network(x, residual, prefetch=prefetch)
        y = self.network(x, None, prefetch=prefetch)
        return added(residual, y, self.post_norm, self.residual_scale)

    def network(
        self,
        x: Array,
        residual: Array | None,
        norm: Norm | None = None,
        prefetch: Ahead = (),
    ) -> Array:
        """The network of x, plus a residual; `norm` stands in for the network's own."""
        norm = self.norm if norm is None else norm
        first = self.first
        modules = *first, self.down
        if len(first) == 2 and fusible(*modules) and all(m.bias is None for m in modules):
            x, options = normalized(x, norm)
            options |= {"activation": self.activation, "residual": residual}
            options["prefetch"] = weights_of(prefetch)
            return jq.mlp(x, *(m.weight for m in modules), **options)
        h = activate(self.activation, *linear(x, *first, norm=norm, prefetch=[self.down]))
        return linear(h, self.down, residual=residual, prefetch=prefetch)[0]


def activate(activation: str, gate: Array, up: Array | None = None) -> Array:
    """The activation of a gate, times `up` if there is one."""
    up = jnp.ones((), gate.dtype) if up is None else up
    return jq.ACTIVATION_FUNCTIONS[activation](gate, up)
