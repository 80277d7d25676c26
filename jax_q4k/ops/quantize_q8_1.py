"""Quantizes activations to int8 in groups of 32, each with a scale and a sum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ptx_kernels.limits import GROUP

from ..custom_call import ptx_name
from ..sharding.layout import Layout, Rows
from . import checks
from .op import KernelCall, Op


def quantize_q8_1(x: Any) -> tuple[jax.Array, jax.Array]:
    """Quantizes groups of 32 along the last axis: x ~ values * scale.

    With amax the largest magnitude of a group: scale = amax * (1 / 127), value = round(x * (127 /
    amax)) with halves to even, all in float32. This is ggml's `quantize_row_q8_1`, except that the
    scale uses a reciprocal, which XLA would make of a division anyway, and that scale and sum stay
    float32. If amax is zero, infinite or NaN, all values are 0. The scale of a group with Inf or
    NaN is Inf or NaN, and its sum NaN, so that such a row's products are NaN.

    Args:
      x: (..., k) float32, bfloat16 or float16; k a multiple of 32.

    Returns:
      Values int8 (..., k), and float32 (..., k / 32, 2) with the scale in [..., 0] and scale * sum
      of values in [..., 1].

    Raises:
      TypeError: a dtype that is not listed. ValueError: no axis, or a k that is not a multiple of
        32.
    """
    x = checks.float_array("x", x)
    if x.ndim < 1 or x.shape[-1] % GROUP:
        raise ValueError(f"x has shape {x.shape}; its last axis must be a multiple of {GROUP}")
    *leading, k = x.shape
    if x.size == 0:
        return jnp.zeros(x.shape, jnp.int8), jnp.zeros((*leading, k // GROUP, 2), jnp.float32)
    rows = Rows.of(x)
    values, scale_sum = _op.bind(rows.merge(x))
    return rows.split(values), rows.split(scale_sum)


def to_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantizes float32 (..., n) to int8 (..., n) and scales (...), like `quantize_q8_1`.

    The whole last axis is one group.
    """
    amax = jnp.max(jnp.abs(x), axis=-1)
    usable = (amax > 0) & jnp.isfinite(amax)
    inverse = jnp.where(usable, 127.0 / jnp.where(usable, amax, 1.0), 0.0)
    scaled = jnp.where(usable[..., None], x * inverse[..., None], 0.0)
    # The clip matters for an amax below 2^-120, where the reciprocal's rounding or overflow could
    # exceed 127.
    values = jnp.clip(jnp.round(scaled), -127, 127).astype(jnp.int8)
    return values, amax * jnp.float32(1 / 127)


def reference(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`quantize_q8_1` of x (m, k) in plain JAX."""
    m, k = x.shape
    groups = x.astype(jnp.float32).reshape(m, k // GROUP, GROUP)
    values, scale = to_int8(groups)
    total = jnp.sum(values.astype(jnp.int32), axis=-1).astype(jnp.float32)
    return values.reshape(m, k), jnp.stack([scale, scale * total], axis=-1)


def rounded(x: jax.Array) -> jax.Array:
    """Returns float32 x (m, k) quantized to q8_1 and dequantized again."""
    values, scale_sum = reference(x)
    groups = values.reshape(*scale_sum.shape[:-1], GROUP).astype(jnp.float32)
    return (groups * scale_sum[..., :1]).reshape(x.shape)


def ptx(launch: KernelCall, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`quantize_q8_1` of x (m, k) by PTX kernels."""
    from ptx_kernels.kernels.quantize_q8_1 import quantize_q8_1 as quantize_kernel

    rows, columns = x.shape
    kernel = quantize_kernel(rows=rows, columns=columns, dtype=ptx_name(x.dtype))
    values, scale_sum = launch(kernel, x)
    return values, scale_sum


def _shapes(x: Any) -> Any:
    m, k = x.shape
    return (
        jax.ShapeDtypeStruct((m, k), jnp.int8),
        jax.ShapeDtypeStruct((m, k // GROUP, 2), jnp.float32),
    )


_op = Op(
    "quantize_q8_1",
    reference,
    shapes=_shapes,
    ptx=ptx,
    layout=lambda *_: Layout(("m k",), ("m k", "m k")),
)
