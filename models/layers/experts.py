"""Mixtures of experts: a feed-forward network of which every token takes a few parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax import Array

import jax_q4k as jq

from ..expert_fields import Experts as Shape
from .linear import Linear, Matrix, Norm, RMSNorm, added, normalized, scaled
from .mlp import MLP, activate


class ExpertLinear(Matrix):
    """x (..., k) of tokens, and ids (..., top) of their experts -> (..., top, n).

    Its weight is (experts, n, k), its bias (experts, n), its scale (experts,).
    """

    def __call__(self, x: Array, ids: Array) -> Array:
        y = jq.expert_matmul(x, self.weight, ids)
        scale = None if self.scale is None else jq.embedding(ids, self.scale[:, None])
        return scaled(y, scale, None if self.bias is None else jq.embedding(ids, self.bias))


@dataclasses.dataclass(eq=False, repr=False)
class Experts(nnx.Module):
    """The sum of a token's experts, each a gated network, weighted as the router says.

    Attributes:
      router: hidden_size -> logits of the experts, in float32.
      gate, up, down: of each expert.
      shape: how many there are, and how a token's are chosen.
      selection_bias: (experts,), added to scores where experts are chosen, not to their weights.
      shared: the expert that every token has; its norm is that of x.
      shared_gate: (hidden_size,), the weights of the sigmoid that is its factor; None: 1.
      norm, post_norm, activation, residual_scale: as in MLP.
    """

    router: Linear
    gate: ExpertLinear
    up: ExpertLinear
    down: ExpertLinear
    shape: Shape
    selection_bias: nnx.Variable[Array] | None = None
    shared: MLP | None = None
    shared_gate: nnx.Variable[Array] | None = None
    norm: Norm | None = None
    post_norm: Norm | None = None
    activation: str = "silu"
    residual_scale: float | None = None

    def __call__(self, x: Array, residual: Array | None = None) -> Array:
        """x (..., hidden_size) -> the residual, or x, plus the mixture of x."""
        residual = x if residual is None else residual
        if self.post_norm is None and self.residual_scale is None:
            return self._mixture(x, residual)
        return added(residual, self._mixture(x, None), self.post_norm, self.residual_scale)

    def route(self, h: Array) -> tuple[Array, Array]:
        """Ids int32 (..., used) and weights float32 (..., used) of the experts of normalized h."""
        bias, options = self._selection()
        return jq.route(self._logits(h, None), self.shape.used, bias=bias, **options)

    def _logits(self, x: Array, norm: Norm | None) -> Array:
        """Logits (..., experts) of norm(x)."""
        x, options = normalized(x, norm)
        options |= {"biases": [self.router.bias], "activations": "f32"}
        (logits,) = jq.linear(x, [self.router.weight], **options)
        return logits

    def _selection(self) -> tuple[Array | None, dict[str, Any]]:
        """The selection's bias, and the other arguments of the choice."""
        names = ("gating", "groups", "groups_used", "normalize", "scale")
        bias = None if self.selection_bias is None else self.selection_bias.get_value()
        return bias, {name: getattr(self.shape, name) for name in names}

    def _mixture(self, x: Array, residual: Array | None) -> Array:
        modules = self.gate, self.up, self.down
        plain = all(type(m) is ExpertLinear and m.scale is None for m in modules)
        fused = plain and self.shared is None and isinstance(self.norm, RMSNorm)
        norm, h = (self.norm, x) if fused or self.norm is None else (None, self.norm(x))
        if self.shared is not None:
            residual = self._shared(h, residual)
        if plain:
            logits, (bias, options) = self._logits(h, norm), self._selection()
            h, norms = normalized(h, norm)
            options |= {
                "selection_bias": bias,
                "activation": self.activation,
                "biases": [module.bias for module in modules],
                "residual": residual,
            }
            gate, up, down = (module.weight for module in modules)
            return jq.routed_mlp(h, logits, gate, up, down, self.shape.used, **options, **norms)
        ids, weights = self.route(h)
        activated = activate(self.activation, self.gate(h, ids), self.up(h, ids))
        y = (weights[..., None] * self.down(activated, ids)).sum(-2)
        return y if residual is None else residual + y

    def _shared(self, h: Array, residual: Array | None) -> Array:
        """residual + the shared expert of h."""
        assert self.shared is not None
        if self.shared_gate is None:
            return self.shared.network(h, residual)
        logit = jq.matmul(h, self.shared_gate.get_value()[None], activations="f32")
        y = jax.nn.sigmoid(logit) * self.shared.network(h, None)
        return y if residual is None else residual + y
