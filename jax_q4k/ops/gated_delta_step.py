"""Decode step of a gated delta net: convolution, delta rule, gated norm (no projections)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ptx_kernels.limits import gated_delta_takes

from ..native import calls
from ..sharding.layout import Layout
from . import checks, gated_delta_rule, rms_norm
from .op import KernelCall, Op
from .vmaps import by_rows


def gated_delta_step(
    qkv: Any,
    z: Any,
    alpha: Any,
    beta: Any,
    columns: Any,
    state: Any,
    positions: Any,
    *,
    conv_weight: Any,
    dt_bias: Any,
    decay: Any,
    norm_weight: Any,
    eps: float,
    tiled: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs one projected token per sequence through a gated delta net; the caller projects.

    Computes, in float32: a causal depthwise convolution over the last `width` columns of the
    projections q | k | v, then silu; q and k normalized per head, x / sqrt(sum(x^2) + eps);
    `gated_delta_rule` with g = softplus(alpha + dt_bias) * decay, beta = sigmoid(beta) and scale
    key_dim ** -0.5; y = rms_norm(o, norm_weight) * silu(z), per v head. This is the mixer of Gated
    Delta Networks (https://arxiv.org/abs/2412.06464) as in Qwen 3.5. Kernels take the same heads as
    those of `gated_delta_rule`.

    Columns are a ring buffer: token t's column is in slot t % width. Only this slot is written, so
    that heads which share a k head may read the others at the same time. Donated columns and state
    are updated in place.

    At position 0 the state counts as zeros, and so do columns before position 0, whatever they
    hold, even NaN.

    Args:
      qkv: (batch, channels) float32, bfloat16 or float16: the token's projections q | k | v, which
        are its column. channels is 2 * num_k_heads * key_dim + num_v_heads * value_dim.
      z: (batch, num_v_heads * value_dim) of these dtypes.
      alpha, beta: (batch, num_v_heads) of these dtypes, as projected.
      columns: (batch, width, channels) float32.
      state: (batch, num_v_heads, key_dim, value_dim) float32.
      positions: (batch,) integers, the token's index in its sequence. For a negative one, columns
        and state stay the same, and y is zeros.
      conv_weight: (channels, width) of these dtypes; the last is the current token's.
      dt_bias, decay: (num_v_heads,) of these dtypes; decay negative (GGUF's ssm_a).
      norm_weight: (value_dim,) of these dtypes.
      eps: added to sums and mean squares, at least 0.
      tiled: selects the k head of a v head, see `gated_delta_rule`.

    Returns:
      y (batch, num_v_heads * value_dim) of qkv's dtype, and the updated columns and state.

    Raises:
      TypeError, ValueError: dtypes or shapes that don't fit.
      NotImplementedError: under differentiation; there is no derivative.
    """
    qkv = checks.float_array("qkv", qkv)
    if qkv.ndim != 2:
        raise ValueError(f"qkv has shape {qkv.shape}; it must be (batch, channels)")
    batch, channels = qkv.shape
    state = checks.float_array("state", state, checks.FLOAT32)
    if state.ndim != 4 or state.shape[0] != batch or not all(state.shape[1:]):
        rule = f"({batch}, num_v_heads, key_dim, value_dim), with a head and dimensions"
        raise ValueError(f"state has shape {state.shape}; it must be {rule}")
    _, num_v_heads, key_dim, value_dim = state.shape
    values = num_v_heads * value_dim
    keys, rest = divmod(channels - values, 2 * key_dim)
    if rest or keys < 1:
        raise ValueError(
            f"qkv has {channels} channels; they must be 2 * num_k_heads * key_dim={key_dim} and "
            f"num_v_heads * value_dim = {values}, of state"
        )
    checks.v_heads(num_v_heads, keys)
    columns = checks.float_array("columns", columns, checks.FLOAT32)
    if columns.ndim != 3 or (columns.shape[0], columns.shape[2]) != (batch, channels):
        rule = f"({batch}, width, {channels}), as qkv is"
        raise ValueError(f"columns has shape {columns.shape}; it must be {rule}")
    if not (width := columns.shape[1]):
        raise ValueError(f"columns has shape {columns.shape}; width=0 must be positive")
    positions = checks.int32_array("positions", positions)
    checks.same_shape("positions", positions, (batch,), "(batch,)")
    heads, of_heads = (num_v_heads,), "(num_v_heads,)"
    given = (
        checks.float32("z", z, (batch, values), "(batch, num_v_heads * value_dim)"),
        checks.float32("alpha", alpha, (batch, num_v_heads), "(batch, num_v_heads)"),
        checks.float32("beta", beta, (batch, num_v_heads), "(batch, num_v_heads)"),
    )
    weights = (
        checks.float32("conv_weight", conv_weight, (channels, width), "(channels, width)"),
        checks.float32("dt_bias", dt_bias, heads, of_heads),
        checks.float32("decay", decay, heads, of_heads),
        checks.float32("norm_weight", norm_weight, (value_dim,), "(value_dim,)"),
    )
    params = {"eps": checks.epsilon("eps", eps), "tiled": checks.flag("tiled", tiled)}
    if batch == 0:
        return given[0].astype(qkv.dtype), columns, state
    column = qkv.astype(jnp.float32)
    y, columns, state = _op.bind(column, *given, columns, state, positions, *weights, **params)
    return y.astype(qkv.dtype), columns, state


class Operands(NamedTuple):
    """The primitive's operands, float32 except positions; shapes as in `gated_delta_step`."""

    qkv: jax.Array
    z: jax.Array
    alpha: jax.Array
    beta: jax.Array
    columns: jax.Array
    state: jax.Array
    positions: jax.Array
    conv_weight: jax.Array
    dt_bias: jax.Array
    decay: jax.Array
    norm_weight: jax.Array


def reference(
    *operands: jax.Array, eps: float, tiled: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`gated_delta_step` in plain JAX."""
    given = Operands(*operands)
    batch, num_v_heads, key_dim, value_dim = given.state.shape
    real = given.positions >= 0
    position = jnp.where(real, given.positions, 0)
    u, ring = convolved(given.qkv, given.columns, position, given.conv_weight)
    keys = (given.qkv.shape[1] - num_v_heads * value_dim) // 2
    q, k = (x.reshape(batch, -1, key_dim) for x in (u[:, :keys], u[:, keys : 2 * keys]))
    q, k = (
        gated_delta_rule.of_v_heads(
            x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + eps),
            num_v_heads,
            1,
            tiled,
        )
        for x in (q, k)
    )
    v = u[:, 2 * keys :].reshape(batch, num_v_heads, value_dim)
    after, o = gated_delta_rule.token(
        jnp.where((position == 0)[:, None, None, None], 0, given.state),
        *(q, k, v),
        jax.nn.softplus(given.alpha + given.dt_bias) * given.decay,
        jax.nn.sigmoid(given.beta),
        scale=key_dim**-0.5,
    )
    y = rms_norm.reference(o, given.norm_weight, eps=eps) * jax.nn.silu(given.z.reshape(o.shape))
    return (
        jnp.where(real[:, None], y.reshape(given.z.shape), 0),
        jnp.where(real[:, None, None], ring, given.columns),
        jnp.where(real[:, None, None, None], after, given.state),
    )


def ptx(launch: KernelCall, *operands: jax.Array, eps: float, tiled: bool) -> Sequence[jax.Array]:
    """`gated_delta_step` by a PTX kernel, or in plain JAX for head sizes without a kernel."""
    from ptx_kernels.kernels.gated_delta import gated_delta_step as step_kernel
    from ptx_kernels.kernels.gated_delta import gated_delta_step_rule
    from ptx_kernels.tuning import choose

    given = Operands(*operands)
    channels, (batch, num_v_heads, key_dim, value_dim) = given.qkv.shape[1], given.state.shape
    if not gated_delta_takes(key_dim, value_dim):
        return reference(*operands, eps=eps, tiled=tiled)
    kernel = step_kernel(
        batch=batch,
        num_k_heads=(channels - num_v_heads * value_dim) // (2 * key_dim),
        num_v_heads=num_v_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        width=given.columns.shape[1],
        scale=key_dim**-0.5,
        eps=eps,
        tiled=tiled,
        config=choose(gated_delta_step_rule, key_dim, value_dim),
    )
    return launch(kernel, *operands)


def convolved(
    qkv: jax.Array, columns: jax.Array, position: jax.Array, conv_weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns silu of the convolution at `position`, (batch, channels), and updated columns."""
    width = columns.shape[1]
    ago = (position[:, None] - jnp.arange(width)) % width  # age in tokens of each slot's column
    ring = jnp.where((ago == 0)[..., None], qkv[:, None], columns)
    seen = jnp.where((ago <= position[:, None])[..., None], ring, 0)
    weights = conv_weight.T[width - 1 - ago]
    return jax.nn.silu(jnp.sum(seen * weights, axis=1)), ring


def native(*operands: jax.Array, eps: float, tiled: bool) -> Any:
    """`gated_delta_step` by a native kernel, in place, or in plain JAX for other head sizes."""
    if not calls.has_heads(*Operands(*operands).state.shape[2:]):
        return reference(*operands, eps=eps, tiled=tiled)
    return tuple(calls.gated_delta_step(*operands, eps=eps, tiled=tiled))


def _layout(*_: Any, **__: Any) -> Layout:
    # channels concatenate q, k and v, so a part of them does not have complete heads
    return Layout((*["b"] * 7, "_", "_", "_", "_"), "b")


_op = Op(
    "gated_delta_step",
    reference,
    shapes=lambda qkv, z, alpha, beta, columns, state, *_, **__: (z, columns, state),
    ptx=ptx,
    native=native,
    vmap=functools.partial(by_rows, operands=7),  # examples enlarge the batch
    layout=_layout,
    computed=lambda results: results[:1],  # columns and state may start uninitialized
)
