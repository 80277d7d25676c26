"""Root-mean-square normalization (RMSNorm) along the last axis."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..sharding.layout import Layout, Parts, Rows
from . import checks, quantize_f16, quantize_q8_1
from .op import KernelCall, Op
from .vmaps import by_rows


def rms_norm(x: Any, weight: Any, *, eps: float, residual: Any = None) -> jax.Array:
    """[residual +] x / sqrt(mean(x^2) + eps) * weight along the last axis, in float32.

    This is RMSNorm (https://arxiv.org/abs/1910.07467).

    Args:
      x: (..., k) float32, bfloat16 or float16.
      weight: (k,) of these dtypes.
      eps: added to the mean square, at least 0.
      residual: (..., k) of these dtypes, added to the result; None means 0.

    Returns:
      (..., k) of x's dtype.

    Raises:
      TypeError: a dtype that is not listed. ValueError: shapes that don't fit, a negative eps.
    """
    x, weight = checks.float_array("x", x), checks.float_array("weight", weight)
    if x.ndim < 1:
        raise ValueError(f"x has shape {x.shape}; it must be (..., k)")
    checks.same_shape("weight", weight, x.shape[-1:], "(k,)")
    if residual is not None:
        residual = checks.float32("residual", residual, x.shape, "(..., k)")
    eps = checks.epsilon("eps", eps)
    if x.size == 0:
        return x
    rows = Rows.of(x)
    residual = None if residual is None else rows.merge(residual)
    y = _op.bind(rows.merge(x).astype(jnp.float32), residual, weight.astype(jnp.float32), eps=eps)
    return rows.split(y).astype(x.dtype)


def reference(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """`rms_norm` of float32 (m, k) in plain JAX."""
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + eps) * weight


def ptx(
    launch: KernelCall,
    x: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    residual: jax.Array | None = None,
) -> jax.Array:
    """`rms_norm` of float32 (m, k) by a PTX kernel."""
    return launches(launch, x, weight, eps=eps, residual=residual)[0]


def launches(
    launch: KernelCall,
    x: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    residual: jax.Array | None = None,
    output: Literal["f32", "q8_1", "f16"] = "f32",
) -> list[jax.Array]:
    """`rms_norm` of float32 (m, k) by PTX kernels, quantized if `output` is q8_1 or f16.

    Returns [(m, k) float32], or the arrays of `quantize_q8_1` or `quantize_f16`. Rows that a thread
    block cannot hold in registers are normalized by XLA.
    """
    from ptx_kernels.kernels.rms_norm import MAX_COLUMNS, rms_norm_rule
    from ptx_kernels.kernels.rms_norm import rms_norm as norm_kernel
    from ptx_kernels.tuning import choose

    rows, columns = x.shape
    if columns % 4 or columns > MAX_COLUMNS:
        y = plus(reference(x, weight, eps=eps), residual)
        if output == "f32":
            return [y]
        return list((quantize_q8_1 if output == "q8_1" else quantize_f16).ptx(launch, y))
    kernel = norm_kernel(
        rows=rows,
        columns=columns,
        eps=eps,
        residual=residual is not None,
        output=output,
        config=choose(rms_norm_rule, columns),
    )
    return launch(kernel, x, weight, *([] if residual is None else [residual]))


def plus(y: jax.Array, residual: jax.Array | None) -> jax.Array:
    """Returns residual + y; None means 0."""
    return y if residual is None else residual + y


def split(parts: Parts, _: Any, x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """`rms_norm` of a device's shard of float32 (m, k), split along k, in plain JAX."""
    total = parts.sum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), "k")
    mean_square = total / (x.shape[-1] * parts.count("k"))
    return x * jax.lax.rsqrt(mean_square + eps) * weight


_op = Op(
    "rms_norm",
    lambda x, residual, weight, *, eps: plus(reference(x, weight, eps=eps), residual),
    shapes=lambda x, *_, **__: x,
    ptx=lambda launch, x, residual, weight, *, eps: ptx(
        launch, x, weight, eps=eps, residual=residual
    ),
    vmap=functools.partial(by_rows, operands=2),  # x and the residual
    derivative="reference",
    layout=lambda *_, **__: Layout(("m k", "m k", "k"), "m k", combined="k"),
    split=lambda parts, call, x, residual, weight, *, eps: plus(
        split(parts, call, x, weight, eps=eps), residual
    ),
)
