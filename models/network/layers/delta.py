"""Gated delta net as a Flax module: a recurrent token mixer (https://arxiv.org/abs/2412.06464)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import jax_q4k as jq

from ...config.mixer_fields import Delta
from .linear import Linear, Norm, Prefetch, RMSNorm, linear
from .recurrent import Chunk, RecurrentCache, unit_length


@dataclasses.dataclass(eq=False, repr=False)
class GatedDeltaNet(nnx.Module):
    """Token mixer that updates a state matrix per head by a decay and the delta rule.

    Attributes:
      qkv, gate: projections to queries, keys and values, and to the output gate.
      alpha, beta: projections to the decay and the learning rate of each value head. None means
        that both come from `beta_alpha`, which gives for each key head the betas of its value heads
        and then the alphas.
      taps: (channels, width), weights of the convolution over queries, keys and values.
      step_bias, decay: (value heads,); the state decays by the factor
        exp(softplus(alpha + step_bias) * decay).
      output_norm: norm of each head's output.
      tiled: value head h uses key head h % key_heads instead of h // (value_heads / key_heads).
    """

    qkv: Linear
    gate: Linear
    taps: nnx.Variable[Array]
    step_bias: nnx.Variable[Array]
    decay: nnx.Variable[Array]
    output_norm: RMSNorm
    output: Linear
    shape: Delta
    tiled: bool
    alpha: Linear | None = None
    beta: Linear | None = None
    beta_alpha: Linear | None = None
    norm: Norm | None = None

    @property
    def first(self) -> list[Linear]:
        """The input projections."""
        given = self.qkv, self.gate, self.alpha, self.beta, self.beta_alpha
        return [projection for projection in given if projection is not None]

    def __call__(
        self,
        x: Array,
        cache: RecurrentCache,
        residual: Array | None = None,
        prefetch: Prefetch = (),
    ) -> tuple[Array, RecurrentCache]:
        """Returns residual + delta_net(x), (..., hidden_size), and the updated cache.

        residual: x if None. prefetch: projections that run next.
        """
        residual = x if residual is None else residual
        qkv, gate, alpha, beta = self._projected(x)
        if isinstance(cache, Chunk):
            y, cache = self._chunk(cache, *map(cache.rows, (qkv, gate, alpha, beta)))
            y = y.reshape(gate.shape)
        else:
            columns, matrices = cache.state
            y, *after = jq.gated_delta_step(
                qkv,
                gate,
                alpha,
                beta,
                columns,
                matrices,
                cache.positions,
                conv_weight=self.taps.get_value(),
                dt_bias=self.step_bias.get_value(),
                decay=self.decay.get_value(),
                norm_weight=self.output_norm.weight.get_value(),
                eps=self.output_norm.eps,
                tiled=self.tiled,
            )
            cache = cache.with_state(tuple(after))
        y = y.astype(x.dtype)
        return linear(y, self.output, residual=residual, prefetch=prefetch)[0], cache

    def _projected(self, x: Array) -> tuple[Array, Array, Array, Array]:
        if self.beta_alpha is None:
            assert self.alpha is not None and self.beta is not None
            qkv, gate, alpha, beta = linear(x, *self.first, norm=self.norm, prefetch=[self.output])
            return qkv, gate, alpha, beta
        qkv, gate, both = linear(x, *self.first, norm=self.norm, prefetch=[self.output])
        leading, keys = both.shape[:-1], self.shape.key_heads
        both = both.reshape(*leading, keys, 2, -1)
        beta, alpha = (both[..., i, :].reshape(*leading, -1) for i in range(2))
        return qkv, gate, alpha, beta

    def _chunk(
        self, cache: Chunk, qkv: Array, gate: Array, alpha: Array, beta: Array
    ) -> tuple[Array, Chunk]:
        """Runs a chunk of projected tokens.

        Returns the input (batch, time, values) of the output projection, and the updated cache.
        """
        shape, (batch, time, _) = self.shape, qkv.shape
        convolved, ring = cache.convolved(qkv, self.taps.get_value())
        parts = jnp.split(jax.nn.silu(convolved), (shape.keys, 2 * shape.keys), axis=-1)
        dims = shape.head_dim, shape.head_dim, shape.value_dim
        q, k, v = (x.reshape(batch, time, -1, dim) for x, dim in zip(parts, dims, strict=True))
        eps = self.output_norm.eps
        q, k = unit_length(q, eps), unit_length(k, eps)
        step_bias, decay = (x.get_value()[None, None] for x in (self.step_bias, self.decay))
        step = jax.nn.softplus(alpha.astype(jnp.float32) + step_bias)
        g, learned = step * decay, jax.nn.sigmoid(beta.astype(jnp.float32))
        o, after = self._rule(cache, q, k, v, g, learned)
        y = jq.rms_norm(o, self.output_norm.weight.get_value(), eps=eps)
        y = y.reshape(gate.shape) * jax.nn.silu(gate.astype(jnp.float32))
        if ring is not None:
            cache = cache.with_state((ring, after), qkv, q, k, v, g, learned)
        return y, cache

    def _rule(
        self, cache: Chunk, q: Array, k: Array, v: Array, g: Array, beta: Array
    ) -> tuple[Array, Array]:
        """Applies the gated delta rule; returns its output and the new state.

        Padding does not change the state.
        """
        shape, batch = self.shape, len(q)
        before = batch, shape.value_heads, shape.head_dim, shape.value_dim
        matrices = cache.state[1] if cache.state else jnp.zeros(before, jnp.float32)
        real = cache.real(q.shape[1])[..., None]
        g, beta = (jnp.where(real, x, 0.0) for x in (g, beta))
        o, after = jq.gated_delta_rule(q, k, v, g, beta, cache.before(matrices), tiled=self.tiled)
        return o, after

    def accepted(self, trial: Chunk, lengths: Array) -> Chunk:
        """Returns the cache after the accepted draft tokens of a trial: the first `lengths`."""
        cache, (qkv, *others) = trial.shortened(lengths), trial.inputs
        _, after = self._rule(cache, *others)
        return cache.with_state((cache.ring(qkv, self.shape.width), after))
