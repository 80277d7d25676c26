"""Mixtures of experts: a feed-forward network of which every token takes a few parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import jax_q4k as jq

from ...config.expert_fields import Experts as Shape
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
      router_scale: (hidden_size,): the router gets x by its root mean square, times this over the
        root of hidden_size; None: it gets what the experts get.
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
    router_scale: nnx.Variable[Array] | None = None
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
            return self.mixture(x, residual)
        return added(residual, self.mixture(x, None), self.post_norm, self.residual_scale)

    def _logits(self, x: Array, h: Array, norm: Norm | None) -> Array:
        """Logits (..., experts) of norm(h), or of x where the router has a scale of its own."""
        if self.router_scale is None:
            x, options = normalized(h, norm)
        else:
            assert isinstance(self.norm, RMSNorm)
            weight = self.router_scale.get_value() * x.shape[-1] ** -0.5
            options = {"norm_weight": weight, "eps": self.norm.eps}
        options |= {"biases": [self.router.bias], "activations": "f32"}
        (logits,) = jq.linear(x, [self.router.weight], **options)
        return logits

    def _selection(self) -> tuple[Array | None, dict[str, Any]]:
        """The selection's bias, and the other arguments of the choice."""
        names = ("gating", "groups", "groups_used", "normalize", "scale")
        bias = None if self.selection_bias is None else self.selection_bias.get_value()
        return bias, {name: getattr(self.shape, name) for name in names}

    def mixture(self, x: Array, residual: Array | None) -> Array:
        """The mixture of x, plus a residual."""
        modules = self.gate, self.up, self.down
        plain = all(type(m) is ExpertLinear for m in modules)
        plain = plain and all(m.scale is None for m in modules[:2])
        fused = plain and isinstance(self.norm, RMSNorm)
        norm, h = (self.norm, x) if fused or self.norm is None else (None, self.norm(x))
        if self.shared is not None:
            residual = self._shared(h, residual, norm)
        if plain:
            logits, (bias, options) = self._logits(x, h, norm), self._selection()
            h, norms = normalized(h, norm)
            options |= {
                "selection_bias": bias,
                "activation": self.activation,
                "biases": [module.bias for module in modules],
                "down_scale": self.down.scale,
                "residual": residual,
            }
            gate, up, down = (module.weight for module in modules)
            return jq.routed_mlp(h, logits, gate, up, down, self.shape.used, **options, **norms)
        bias, options = self._selection()
        ids, weights = jq.route(self._logits(x, h, norm), self.shape.used, bias=bias, **options)
        activated = activate(self.activation, self.gate(h, ids), self.up(h, ids))
        y = (weights[..., None] * self.down(activated, ids)).sum(-2)
        return y if residual is None else residual + y

    def _shared(self, h: Array, residual: Array | None, norm: Norm | None) -> Array:
        """residual + the shared expert of norm(h)."""
        assert self.shared is not None
        if self.shared_gate is None:
            return self.shared.network(h, residual, norm)
        x, options = normalized(h, norm)
        (logit,) = jq.linear(x, [self.shared_gate.get_value()[None]], activations="f32", **options)
        y = jax.nn.sigmoid(logit) * self.shared.network(h, None, norm)
        return y if residual is None else residual + y


@dataclasses.dataclass(eq=False, repr=False)
class DenseBesideExperts(nnx.Module):
    """A dense network and a mixture of experts, side by side: their normalized results added up.

    post_norm, residual_scale: as in MLP, of the sum.
    """

    dense: MLP
    experts: Experts
    post_norm: Norm
    residual_scale: float | None = None

    def __call__(self, x: Array, residual: Array | None = None) -> Array:
        """x (..., hidden_size) -> the residual, or x, plus the networks of x."""
        residual = x if residual is None else residual
        y = jnp.zeros_like(x)
        y = added(y, self.dense.network(x, None), self.dense.post_norm, None)
        y = added(y, self.experts.mixture(x, None), self.experts.post_norm, None)
        return added(residual, y, self.post_norm, self.residual_scale)
