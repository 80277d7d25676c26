"""Gated and plain feed-forward network (MLP) as a Flax module."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import jax_q4k as jq

from .linear import Linear, Norm, Prefetch, added, fusible, linear, normalized, weights_of

#: Activations of gate and up by name; fused operations have those of `jq.ACTIVATION_FUNCTIONS`.
ACTIVATIONS = jq.ACTIVATION_FUNCTIONS | {
    "gelu_erf": lambda gate, up: jax.nn.gelu(gate, approximate=False) * up
}


@dataclasses.dataclass(eq=False, repr=False)
class MLP(nnx.Module):
    """Computes down(activation(gate(x)) * up(x)).

    Attributes:
      gate: gate projection; None means that the network is down(activation(up(x))).
      norm, post_norm: norms of the input, and of the output before it is added to x; None if
        absent.
      sum_norm: norm of residual + output, in encoders; None if absent.
      activation: a name of ACTIVATIONS, such as "silu" (SwiGLU), "gelu", the tanh approximation
        (GeGLU), or "gelu_erf", the exact GELU.
      residual_scale: factor of the output before it is added to x; None means 1.
    """

    gate: Linear | None
    up: Linear
    down: Linear
    norm: Norm | None = None
    post_norm: Norm | None = None
    sum_norm: Norm | None = None
    activation: str = "silu"
    residual_scale: float | None = None

    def __post_init__(self) -> None:
        if self.activation not in (known := ACTIVATIONS):
            raise ValueError(f"activation={self.activation!r} must be one of {', '.join(known)}")

    @property
    def first(self) -> list[Linear]:
        """The input projections."""
        return [self.up] if self.gate is None else [self.gate, self.up]

    def __call__(self, x: Array, residual: Array | None = None, prefetch: Prefetch = ()) -> Array:
        """Returns residual + post_norm(network(norm(x))), (..., hidden_size).

        residual: x if None. prefetch: projections that run next.
        """
        residual = x if residual is None else residual
        if self.post_norm is None and self.residual_scale is None:
            y = self.network(x, residual, prefetch=prefetch)
            return y if self.sum_norm is None else self.sum_norm(y)
        y = self.network(x, None, prefetch=prefetch)
        return added(residual, y, self.post_norm, self.residual_scale)

    def network(
        self,
        x: Array,
        residual: Array | None,
        norm: Norm | None = None,
        prefetch: Prefetch = (),
    ) -> Array:
        """Returns the network's output for x, plus a residual; applies no `post_norm`.

        residual: None means no residual. norm: replaces the network's own norm, unless None.
        """
        norm = self.norm if norm is None else norm
        first = self.first
        modules = *first, self.down
        is_fused = len(first) == 2 and self.activation in jq.ACTIVATION_FUNCTIONS
        if is_fused and fusible(*modules) and all(m.bias is None for m in modules):
            x, options = normalized(x, norm)
            options |= {"activation": self.activation, "residual": residual}
            options["prefetch"] = weights_of(prefetch)
            return jq.mlp(x, *(m.weight for m in modules), **options)
        h = activate(self.activation, *linear(x, *first, norm=norm, prefetch=[self.down]))
        return linear(h, self.down, residual=residual, prefetch=prefetch)[0]


def activate(activation: str, gate: Array, up: Array | None = None) -> Array:
    """Returns activation(gate), times `up` if it is set."""
    up = jnp.ones((), gate.dtype) if up is None else up
    return ACTIVATIONS[activation](gate, up)
