"""Rows of a packed table, decoded on lookup."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ptx_kernels import formats
from ptx_kernels.kernels.decode import decode

from ..arrays import QuantizedArray
from ..custom_call import ptx_name
from ..native import calls
from . import checks
from .op import KernelCall, Op


def embedding(
    ids: Any, w: Any, dtype: Any = jnp.float32, *, implementation: str | None = None
) -> jax.Array:
    """Rows `ids` of `w` as floats; only those rows are decoded. An id outside 0..vocab-1 gives a
    row of NaN.

    Args:
      ids: (...,) integers.
      w: QuantizedArray (vocab, k), or a float array (vocab, k), in which it is differentiable.
      dtype: float32, bfloat16 or float16.
      implementation: `ptx`, `native`, `xla` or `sim`; None takes what `jax_q4k.implementation`
        selected.

    Returns:
      (..., k) of `dtype`.

    Raises:
      TypeError: ids that are no integers, another dtype. ValueError: `w` has not two axes.
    """
    ids = checks.int32_array("ids", ids)
    dtype = checks.float_dtype("dtype", dtype)
    quantized = isinstance(w, QuantizedArray)
    w = checks.matrix("w", w) if quantized else checks.float_array("w", w)
    if w.ndim != 2:
        raise ValueError(f"w has shape {w.shape}; it must have two axes (vocab, k)")
    vocab, k = w.shape
    count = math.prod(ids.shape)
    if count == 0 or vocab == 0:
        return jnp.full((*ids.shape, k), jnp.nan, dtype)
    flat = ids.reshape(count)
    if quantized:
        (rows,) = _op.bind(
            flat, *w.planes, format=w.format, dtype=dtype, implementation=implementation
        )
    else:
        (rows,) = _float_op.bind(flat, w, dtype=dtype, implementation=implementation)
    return rows.reshape(*ids.shape, k)


def reference(ids: jax.Array, *planes: jax.Array, format: str, dtype: Any) -> list[jax.Array]:
    """`embedding` of ids (count,) in plain JAX."""
    vocab = planes[0].shape[0]
    looked_up = tuple(plane[jnp.clip(ids, 0, vocab - 1)] for plane in planes)
    rows = formats.get(format).decode(looked_up, jnp).astype(dtype)
    return [_nan_outside(ids, vocab, rows)]


def kernels(
    launch: KernelCall, ids: jax.Array, *planes: jax.Array, format: str, dtype: Any
) -> list[jax.Array]:
    """`embedding` of ids (count,) by PTX kernels."""
    n, blocks, _ = planes[0].shape
    kernel = decode(format=format, n=n, blocks=blocks, dtype=ptx_name(dtype), lookups=ids.shape[0])
    return launch(kernel, *planes, ids)


def native(ids: jax.Array, *planes: jax.Array, format: str, dtype: Any) -> list[jax.Array]:
    """`embedding` of ids (count,) by the CPU's kernels."""
    return [calls.embedding(ids, QuantizedArray.tree_unflatten(format, planes)).astype(dtype)]


def _float_reference(ids: jax.Array, w: jax.Array, *, dtype: Any) -> list[jax.Array]:
    """`embedding` of ids (count,) and float rows in plain JAX."""
    vocab = w.shape[0]
    return [_nan_outside(ids, vocab, w[jnp.clip(ids, 0, vocab - 1)].astype(dtype))]


def _float_kernels(
    launch: KernelCall, ids: jax.Array, w: jax.Array, *, dtype: Any
) -> list[jax.Array]:
    """XLA's gather serves float rows on a GPU."""
    return _float_reference(ids, w, dtype=dtype)


def _float_native(ids: jax.Array, w: jax.Array, *, dtype: Any) -> list[jax.Array]:
    """By the CPU's kernels: XLA's gather of bfloat16 makes a float32 copy of the table."""
    return [calls.embedding(ids, w).astype(dtype)]


def _nan_outside(ids: jax.Array, vocab: int, rows: jax.Array) -> jax.Array:
    inside = (ids >= 0) & (ids < vocab)
    return jnp.where(inside[:, None], rows, jnp.nan)


def _abstract_eval(ids: Any, *planes: Any, format: str, dtype: Any) -> list[jax.core.ShapedArray]:
    k = planes[0].shape[1] * formats.get(format).block_size
    return [jax.core.ShapedArray((ids.shape[0], k), dtype)]


_op = Op(
    "q4k_embedding",
    abstract_eval=_abstract_eval,
    reference=reference,
    kernels=kernels,
    native=native,
)
_float_op = Op(
    "float_embedding",
    abstract_eval=lambda ids, w, *, dtype: [
        jax.core.ShapedArray((ids.shape[0], w.shape[1]), dtype)
    ],
    reference=_float_reference,
    kernels=_float_kernels,
    native=_float_native,
)
_float_op.define_derivative_of(
    lambda ids, w, dtype, implementation: _float_reference(ids, w, dtype=dtype)
)
_float_op.define_vmap_of(_float_reference)
