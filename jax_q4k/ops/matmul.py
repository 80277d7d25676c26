"""Activations times packed weights."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ptx_kernels import formats, tuning
from ptx_kernels.kernels.gemm import gemm
from ptx_kernels.kernels.gemm import takes as gemm_takes
from ptx_kernels.kernels.matvec import FORMATS, MAX_ROWS, matvec
from ptx_kernels.kernels.quantize_f16 import quantize_f16

from ..arrays import QuantizedArray
from ..custom_call import ptx_name
from ..implementation import check_selection, current_selection
from ..native import calls
from . import (
    checks,
    dequantize,
    fused_matmul,
    quantize_q8_1,
)  # fused_matmul: modules that use each other
from .float_matmul import dot, float_matmul
from .op import KernelCall, Op

#: Formats with kernels that take int8 activations; more than MAX_ROWS rows of these go to tensor
#: cores.
DOT_FORMATS: tuple[str, ...] = FORMATS


def matmul(
    x: Any,
    w: Any,
    *,
    bias: Any = None,
    residual: Any = None,
    activations: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """y = residual + x @ dequantize(w).T + bias, accumulated in float32.

    A NaN or Inf in a row of `x` reaches that row of y only.

    Differentiable in `x`, any number of times and in both modes: dy = dx @ dequantize(w).T, and its
    transpose dx = dy @ dequantize(w), accumulated in float32 and never quantized: the rounding of
    `q8_1` is passed straight through, as if it were the identity. A packed `w` stays packed between
    the passes and is a constant: `jax.grad` with respect to one raises JAX's error for integers;
    with `allow_int=True` its planes' gradients are float0.

    Args:
      x: (..., k) float32, bfloat16 or float16.
      w: QuantizedArray (n, k), or a float array (n, k) of one of these dtypes, in which it is
        differentiable, too.
      bias: (n,) float array, or None. residual: (..., n) float array, or None.
      activations: `f32`: x as it is. `q8_1`: x quantized to int8 in groups of 32 wherever the CUDA
        path has a kernel that takes it so, on every implementation: for DOT_FORMATS up to eight
        rows (under `vmap`, of all examples together), and for more rows where k is a multiple of
        64. None takes what `jax_q4k.implementation` selected, else `f32` for xla, `q8_1` for
        native, and for ptx and sim what is
        fastest: `q8_1`, or, of many rows on some GPUs, x rounded to float16, 256 columns of a row
        by a common power of two.
      implementation: `ptx`, `native`, `xla` or `sim`; None takes what `jax_q4k.implementation`
        selected.

    Returns:
      (..., n) of x's dtype.

    Raises:
      TypeError: a dtype that is not listed. ValueError: shapes that don't fit, an unknown name.
    """
    if bias is not None or residual is not None:
        biases = None if bias is None else (bias,)
        (y,) = fused_matmul.products(
            "matmul", x, (w,), None, biases, residual, activations, implementation
        )
        return y
    x = checks.float_array("x", x)
    chosen = (
        check_selection(implementation, activations).activations or current_selection().activations
    )
    quantized = isinstance(w, QuantizedArray)
    w = checks.matrix("w", w) if quantized else checks.float_array("w", w)
    if w.ndim != 2:
        raise ValueError(f"w has shape {w.shape}; it must have two axes (n, k)")
    n, k = w.shape
    if x.ndim < 1 or x.shape[-1] != k:
        raise ValueError(f"x has shape {x.shape}; its last axis must be k={k}, as in w {w.shape}")
    leading = x.shape[:-1]
    rows = math.prod(leading)
    if rows == 0 or n == 0:
        return jnp.zeros((*leading, n), x.dtype)
    if quantized:
        (y,) = _op.bind(
            x.reshape(rows, k),
            *w.planes,
            format=w.format,
            activations=chosen,
            transposed=False,
            implementation=implementation,
        )
    else:
        y = float_matmul(x.reshape(rows, k), w, implementation=implementation)
    return y.reshape(*leading, n)


def takes_q8_1(format: str, rows: int, columns: int) -> bool:
    """Whether the CUDA path has a kernel that multiplies `rows` rows of `columns` int8 activations
    by `format`.
    """
    return format in DOT_FORMATS if rows <= MAX_ROWS else gemm_takes(format, columns)


def reference(
    x: jax.Array, *planes: jax.Array, format: str, activations: str | None, transposed: bool
) -> list[jax.Array]:
    """`matmul` of x (m, k) in plain JAX, or its transpose of x (m, n); `activations` None means
    f32.
    """
    weights = formats.get(format).decode(planes, jnp)
    if activations == "q8_1" and takes_q8_1(format, *x.shape):
        values, scale_sum = quantize_q8_1.reference(x)
        groups = values.reshape(*scale_sum.shape[:-1], quantize_q8_1.GROUP).astype(jnp.float32)
        y = dot((groups * scale_sum[..., :1]).reshape(x.shape), weights)
    else:
        y = dot(x, weights, transposed=transposed)
    return [y.astype(x.dtype)]


def kernels(
    launch: KernelCall,
    x: jax.Array,
    *planes: jax.Array,
    format: str,
    activations: str | None,
    transposed: bool,
) -> list[jax.Array]:
    """`matmul` of x (m, k), or its transpose of x (m, n), by PTX kernels; `activations` None:
    whichever is fastest.
    """
    if transposed:
        # Or XLA merges a weight's decoding in the backward pass with that in the forward pass, and
        # every weight of a model lies in memory decoded in between.
        x, planes = jax.lax.optimization_barrier((x, planes))
    m = x.shape[0]
    if activations == "f32" or not takes_q8_1(format, *x.shape):
        (weights,) = dequantize.kernels(
            launch, *planes, format=format, dtype=jnp.dtype(jnp.float32)
        )
        return [dot(x, weights, transposed=transposed).astype(x.dtype)]
    n, columns = planes[0].shape[0], x.shape[1]
    if activations is None and m > MAX_ROWS and (config := tuning.half_gemm(format, n, columns, m)):
        halves = launch(quantize_f16(rows=m, columns=columns, dtype=ptx_name(x.dtype)), x)
        (y,) = launch(
            gemm(format=format, n=n, columns=columns, m=m, config=config), *planes, *halves
        )
        return [y.astype(x.dtype)]
    values, scale_sum = quantize_q8_1.kernels(launch, x)
    # Tensor cores for any number of rows beyond: a product of decoded weights in float32, which has
    # none, is slower at all sizes, even before the decoding.
    family, tuned = (matvec, tuning.matvec) if m <= MAX_ROWS else (gemm, tuning.gemm)
    kernel = family(format=format, n=n, columns=columns, m=m, config=tuned(format, n, columns, m))
    (y,) = launch(kernel, *planes, values, scale_sum)
    return [y.astype(x.dtype)]


def native(
    x: jax.Array, *planes: jax.Array, format: str, activations: str | None, transposed: bool
) -> list[jax.Array]:
    """`matmul` of x (m, k), or its transpose of x (m, n), by the CPU's kernels; `activations` None
    means q8_1.
    """
    if transposed:
        return reference(x, *planes, format=format, activations="f32", transposed=True)
    quantized = activations != "f32" and takes_q8_1(format, *x.shape)
    w = QuantizedArray.tree_unflatten(format, planes)
    return [
        y.astype(x.dtype) for y in calls.products(x.astype(jnp.float32), [w], quantized=quantized)
    ]


def _abstract_eval(
    x: Any, *planes: Any, format: str, activations: str | None, transposed: bool
) -> list[jax.core.ShapedArray]:
    n, blocks, _ = planes[0].shape
    return [
        jax.core.ShapedArray(
            (x.shape[0], blocks * formats.get(format).block_size if transposed else n), x.dtype
        )
    ]


_op = Op(
    "q4k_matmul", abstract_eval=_abstract_eval, reference=reference, kernels=kernels, native=native
)
# Parameter `transposed`: x @ dequantize(w) instead; only derivatives set it, and with activations
# "f32".
_op.define_derivative(
    tangent=lambda params: {**params, "activations": "f32"},
    transpose=lambda params: {**params, "transposed": not params["transposed"]},
)
_op.define_vmap_of_rows()
