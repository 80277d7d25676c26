"""Multiplies activations by packed weights; the primitive is linear in its activations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ptx_kernels import formats
from ptx_kernels.limits import MAX_ROWS, gemm_takes

from ..arrays import QuantizedArray
from ..arrays.indexed import Packed, axes, layers
from ..native import calls
from ..sharding.layout import Layout, Parts
from . import dequantize, gemm, quantize_q8_1
from .derivatives import Linear
from .float_matmul import dot
from .op import KernelCall, Op
from .select_kernel import select_matmul_kernel
from .vmaps import by_rows

#: The native kernels quantize any number of rows if the number of columns is a multiple of this.
INT8_COLUMNS = 64


def packed_matmul(x: jax.Array, w: Packed, activations: str | None) -> jax.Array:
    """x (m, k) times dequantize(w) (n, k) transposed, accumulated in float32, of x's dtype.

    m and n are at least 1. Differentiable in x, any number of times, in forward and reverse mode:
    tangents and cotangents are never quantized.
    """
    y: jax.Array = op.bind(x, w, activations=activations, transposed=False)
    return y


def takes_q8_1(format: str, rows: int, columns: int) -> bool:
    """Returns whether a CUDA kernel multiplies int8 activations (rows, columns) by `format`.

    For a symbolic number of rows, returns what holds for any number.
    """
    return gemm_takes(format, columns) or (isinstance(rows, int) and rows <= MAX_ROWS)


def quantizes(weights: Any, rows: int, columns: int, activations: str | None) -> bool:
    """Returns whether CUDA kernels may quantize this many activations to q8_1 for these weights.

    They choose q8_1 or floats if `activations` is None.
    """
    return activations != "f32" and all(takes_q8_1(w.format, rows, columns) for w in weights)


def quantizes_natively(weights: Any, rows: int, columns: int, activations: str | None) -> bool:
    """Returns whether the native kernels quantize activations to q8_1 for these weights.

    By default they do if `columns` is a multiple of INT8_COLUMNS, so that a row's result does not
    depend on the number of rows. Otherwise only few rows are quantized, as by CUDA kernels.
    """
    always = activations is None and columns % INT8_COLUMNS == 0
    return always or quantizes(weights, rows, columns, activations)


def reference(
    x: jax.Array, w: Packed, *, activations: str | None, transposed: bool = False
) -> jax.Array:
    """`packed_matmul` in plain JAX, or its transpose for x (m, n); `activations` None means f32."""
    weights = formats.get(w.format).decode(w.planes, jnp)
    if activations == "q8_1" and takes_q8_1(w.format, *x.shape):
        y = dot(quantize_q8_1.rounded(x), weights)
    else:
        y = dot(x, weights, transposed=transposed)
    return y.astype(x.dtype)


def ptx(
    launch: KernelCall,
    x: jax.Array,
    w: Packed,
    *,
    activations: str | None,
    transposed: bool = False,
) -> jax.Array:
    """`packed_matmul` by PTX kernels, or its transpose for x (m, n).

    `activations` None selects the fastest format.
    Few rows run as a mat-vec, more rows in q8_1 or float16 on tensor cores (int8 or f16 `mma`).
    Otherwise XLA multiplies by decoded weights: in float16 where `decoded` finds that faster, and
    in float32 if no kernel takes these rows or the product must be precise.
    """
    if transposed:
        # Without the barrier, XLA merges the decoding of a weight in the forward and the backward
        # pass, and every decoded weight of a model stays in memory in between.
        x, w = jax.lax.optimization_barrier((x, w))
    elif (product := select_matmul_kernel([w], x.shape[0], activations)) is not None:
        (y,) = product(launch, x, [w])
        return y.astype(x.dtype)
    elif quantizes([w], x.shape[0], x.shape[1], activations):
        return _gemm(launch, x, w, activations).astype(x.dtype)
    weights = dequantize.ptx(launch, w, dtype=jnp.dtype(jnp.float32))
    return dot(x, weights, transposed=transposed).astype(x.dtype)


def _gemm(launch: KernelCall, x: jax.Array, w: Packed, activations: str | None) -> jax.Array:
    """x (m, k) times dequantize(w) (n, k) transposed, on tensor cores: float32 (m, n).

    Used for any number of rows: a float32 matmul with decoded weights, which has no tensor cores,
    is slower at all sizes, even without the decoding.
    """
    from ptx_kernels.kernels.gemm import stackable

    if layers(w) and not stackable(w.format, *w.shape):
        w = QuantizedArray(w.format, w.shape, w.planes)
    (y,) = gemm.gemm(launch, x, [w], activations=activations)
    return y


def native(
    x: jax.Array, w: Packed, *, activations: str | None, transposed: bool = False
) -> jax.Array:
    """`packed_matmul` by the native kernels, or its transpose; `activations` None means q8_1."""
    if transposed:
        return reference(x, w, activations="f32", transposed=True)
    quantized = quantizes_natively([w], x.shape[0], x.shape[1], activations)
    (y,) = calls.linear(x.astype(jnp.float32), [w], quantized=quantized)
    return y.astype(x.dtype)


def _shapes(x: Any, w: Any, *, activations: str | None, transposed: bool = False) -> Any:
    return jax.ShapeDtypeStruct((x.shape[0], w.shape[1 if transposed else 0]), x.dtype)


def _layout(_: Any, w: Any, *, transposed: bool, **__: Any) -> Layout:
    if transposed:
        return Layout(("m n", axes(w, "n k")), "m k", combined="n")
    return Layout(("m k", axes(w, "n k")), "m n", combined="k")


def _split(
    parts: Parts, call: Any, x: jax.Array, w: Packed, *, transposed: bool, **params: Any
) -> jax.Array:
    """Multiplies a device's shard of k (transposed: of n); sums over devices in float32."""
    y = call(op, x.astype(jnp.float32), w, transposed=transposed, **params)
    total: jax.Array = parts.sum(y, "n" if transposed else "k")
    return total.astype(x.dtype)


# `transposed`: x @ dequantize(w); only derivatives set it, and with activations "f32".
op = Op(
    "packed_matmul",
    reference,
    shapes=_shapes,
    ptx=ptx,
    native=native,
    vmap=by_rows,
    layout=_layout,
    split=_split,
    derivative=Linear(
        tangent=lambda params: {**params, "activations": "f32"},
        transpose=lambda params: {**params, "transposed": not params["transposed"]},
    ),
)
