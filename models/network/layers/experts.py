"""Mixture of experts (MoE) as Flax modules: router, expert MLPs and shared experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax import Array

import jax_q4k as jq

from ...config.expert_fields import Experts as Shape
from .linear import Linear, Matrix, Norm, RMSNorm, added, fusible, normalized, scaled
from .mlp import MLP, activate


class ExpertLinear(Matrix):
    """Linear layer per expert: maps tokens x (..., k) and expert ids (..., top) to (..., top, n).

    The weight is (experts, n, k), the bias (experts, n), the scale (experts,).
    """

    def __call__(self, x: Array, ids: Array) -> Array:
        y = jq.expert_matmul(x, self.weight, ids)
        scale = None if self.scale is None else jq.embedding(ids, self.scale[:, None])
        return scaled(y, scale, None if self.bias is None else jq.embedding(ids, self.bias))


@dataclasses.dataclass(eq=False, repr=False)
class Experts(nnx.Module):
    """MoE layer: sums the outputs of the MLPs that the router selects for a token.

    Attributes:
      router: projection to the experts' logits, in float32.
      gate, up, down: projections of all experts. Without a gate, each expert is
        down(activation(up(x))).
      shape: number of experts, and how a token's experts are selected.
      router_scale: (hidden_size,); the router gets x / rms(x) * router_scale / sqrt(hidden_size).
        None means that the router gets the experts' input.
      selection_bias: (experts,), added to scores for the selection, but not to the weights.
      shared: expert that every token uses, after the norm of this module; None if absent.
      shared_gate: (hidden_size,); sigmoid(shared_gate @ x) is the factor of `shared`. None means 1.
      sum_bias: (hidden_size,), added to the sum of the experts' outputs; None if absent.
      norm, post_norm, sum_norm, activation, residual_scale: as in MLP.
    """

    router: Linear
    gate: ExpertLinear | None
    up: ExpertLinear
    down: ExpertLinear
    shape: Shape
    router_scale: nnx.Variable[Array] | None = None
    selection_bias: nnx.Variable[Array] | None = None
    shared: MLP | None = None
    shared_gate: nnx.Variable[Array] | None = None
    sum_bias: nnx.Variable[Array] | None = None
    norm: Norm | None = None
    post_norm: Norm | None = None
    sum_norm: Norm | None = None
    activation: str = "silu"
    residual_scale: float | None = None

    def __call__(self, x: Array, residual: Array | None = None) -> Array:
        """Returns residual + experts(x), (..., hidden_size); residual: x if None."""
        residual = x if residual is None else residual
        if self.post_norm is None and self.residual_scale is None:
            y = self.mixture(x, residual)
            return y if self.sum_norm is None else self.sum_norm(y)
        return added(residual, self.mixture(x, None), self.post_norm, self.residual_scale)

    def _logits(self, x: Array, h: Array, norm: Norm | None) -> Array:
        """Returns the router's logits (..., experts) of norm(h), or of x with `router_scale`."""
        if self.router_scale is None:
            x, options = normalized(h, norm)
        else:
            assert isinstance(self.norm, RMSNorm)
            weight = self.router_scale.get_value() * x.shape[-1] ** -0.5
            options = {"norm_weight": weight, "eps": self.norm.eps}
        if type(self.router) is not Linear:
            weight, eps = options.pop("norm_weight", None), options.pop("eps", None)
            return self.router(x if weight is None else jq.rms_norm(x, weight, eps=eps))
        options |= {"biases": [self.router.bias], "activations": "f32"}
        (logits,) = jq.linear(x, [self.router.weight], **options)
        return logits

    def _selection(self) -> tuple[Array | None, dict[str, Any]]:
        """Returns the selection bias (None if absent) and other options of `jax_q4k.route`."""
        names = ("gating", "groups", "groups_used", "group_best", "normalize", "scale")
        bias = None if self.selection_bias is None else self.selection_bias.get_value()
        return bias, {name: getattr(self.shape, name) for name in names}

    @property
    def _stacks(self) -> list[ExpertLinear] | None:
        """Gate, up and down if `jax_q4k.routed_mlp` takes them, else None."""
        modules = [m for m in (self.gate, self.up, self.down) if type(m) is ExpertLinear]
        plain = len(modules) == 3 and all(m.scale is None for m in modules[:2])
        plain = plain and self.activation in jq.ACTIVATION_FUNCTIONS
        return modules if plain and self.sum_bias is None else None

    @property
    def _shared_matrices(self) -> list[Linear] | None:
        """Gate, up and down of `shared` if `jax_q4k.routed_mlp` takes them, else None."""
        if self.shared is None or self._stacks is None:
            return None
        modules = [m for m in (self.shared.gate, self.shared.up, self.shared.down) if m is not None]
        plain = len(modules) == 3 and fusible(*modules) and all(m.bias is None for m in modules)
        plain = plain and self.shared.norm is None and self.shared.activation == self.activation
        return modules if plain else None

    def mixture(self, x: Array, residual: Array | None) -> Array:
        """Returns [residual +] the weighted sum of the selected experts' outputs for x."""
        stacks, shared = self._stacks, self._shared_matrices
        fused = stacks is not None and isinstance(self.norm, RMSNorm)
        norm, h = (self.norm, x) if fused or self.norm is None else (None, self.norm(x))
        if self.shared is not None and shared is None:
            residual = self._shared(h, residual, norm)
        if stacks is not None:
            (bias, options), shared_logits = self._selection(), None
            if shared is None or self.shared_gate is None:
                logits = self._logits(x, h, norm)
            else:
                logits, shared_logits = self._both_logits(x, h, norm)
            h, norms = normalized(h, norm)
            options |= {
                "shared": None if shared is None else [module.weight for module in shared],
                "shared_logits": shared_logits,
                "selection_bias": bias,
                "activation": self.activation,
                "biases": [module.bias for module in stacks],
                "down_scale": self.down.scale,
                "residual": residual,
            }
            gate, up, down = (module.weight for module in stacks)
            return jq.routed_mlp(h, logits, gate, up, down, self.shape.used, **options, **norms)
        bias, options = self._selection()
        ids, weights = jq.route(self._logits(x, h, norm), self.shape.used, bias=bias, **options)
        first = [self.up] if self.gate is None else [self.gate, self.up]
        activated = activate(self.activation, *(module(h, ids) for module in first))
        y = (weights[..., None] * self.down(activated, ids)).sum(-2)
        y = y if self.sum_bias is None else y + self.sum_bias.get_value()
        return y if residual is None else residual + y

    def _shared(self, h: Array, residual: Array | None, norm: Norm | None) -> Array:
        """Returns residual + sigmoid(shared_gate @ norm(h)) * shared(norm(h))."""
        assert self.shared is not None
        if self.shared_gate is None:
            return self.shared.network(h, residual, norm)
        x, options = normalized(h, norm)
        y = jax.nn.sigmoid(self._gate_logit(h, norm)) * self.shared.network(h, None, norm)
        return y if residual is None else residual + y

    def _gate_logit(self, h: Array, norm: Norm | None) -> Array:
        """Returns shared_gate @ norm(h), (..., 1)."""
        assert self.shared_gate is not None
        x, options = normalized(h, norm)
        (logit,) = jq.linear(x, [self.shared_gate.get_value()[None]], activations="f32", **options)
        return logit

    def _both_logits(self, x: Array, h: Array, norm: Norm | None) -> tuple[Array, Array]:
        """Returns the logits of the router and of the shared expert's gate, by one product."""
        joint = type(self.router) is Linear and self.router_scale is None
        if not joint or self.shared_gate is None or jq.is_quantized(self.router.weight):
            return self._logits(x, h, norm), self._gate_logit(h, norm)
        h, options = normalized(h, norm)
        weights = [self.router.weight, self.shared_gate.get_value()[None]]
        biases = [self.router.bias, None]
        logits, logit = jq.linear(h, weights, biases=biases, activations="f32", **options)
        return logits, logit


@dataclasses.dataclass(eq=False, repr=False)
class DenseBesideExperts(nnx.Module):
    """Runs a dense MLP and a mixture of experts in parallel; sums their normalized outputs.

    post_norm, residual_scale: as in MLP, applied to the sum.
    """

    dense: MLP
    experts: Experts
    post_norm: Norm
    residual_scale: float | None = None

    def __call__(self, x: Array, residual: Array | None = None) -> Array:
        """Returns residual + scale * post_norm(dense(x) + experts(x)); residual: x if None."""
        residual = x if residual is None else residual
        y = added(None, self.dense.network(x, None), self.dense.post_norm, None)
        y = added(y, self.experts.mixture(x, None), self.experts.post_norm, None)
        return added(residual, y, self.post_norm, self.residual_scale)
