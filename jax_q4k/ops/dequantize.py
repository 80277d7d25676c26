"""Decodes packed weights to floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ptx_kernels import formats

from ..arrays import QuantizedArray
from ..arrays.indexed import Packed, layers
from ..custom_call import ptx_name
from ..sharding.layout import Layout
from . import checks
from .op import KernelCall, Op


def dequantize(w: Any, dtype: Any = jnp.float32) -> jax.Array:
    """Decodes the weights of `w` to floats.

    In float32 they equal ggml's values exactly; other dtypes are rounded to nearest. Subnormal
    weights (MXFP4 has some, below 2^-126) are kept. XLA's own arithmetic on a CPU flushes them to
    zero, so products in plain JAX lack them.

    Args:
      w: QuantizedArray (n, k).
      dtype: float32, bfloat16 or float16.

    Returns:
      (n, k) of `dtype`.

    Raises:
      TypeError: `w` is not a QuantizedArray, or a dtype that is not listed. ValueError: `w` does
        not have two axes.
    """
    w = checks.matrix("w", w)
    dtype = checks.float_dtype("dtype", dtype)
    if w.shape[0] == 0:
        return jnp.zeros(w.shape, dtype)
    out: jax.Array = _op.bind(w, dtype=dtype)
    return out


def reference(w: QuantizedArray, *, dtype: Any) -> jax.Array:
    """`dequantize` in plain JAX."""
    return formats.get(w.format).decode(w.planes, jnp).astype(dtype)


def ptx(launch: KernelCall, w: Packed, *, dtype: Any) -> jax.Array:
    """`dequantize` by a PTX kernel."""
    (out,) = _launch(launch, w, dtype=ptx_name(dtype))
    return out


def scaled(launch: KernelCall, w: Packed, below: int) -> tuple[jax.Array, jax.Array]:
    """Decodes weights by a PTX kernel to float16 (n, k) and one bfloat16 scale per row (n,).

    A scale is the power of two that brings its row's largest magnitude below `below`, and not below
    half of it.
    """
    values, scale = _launch(launch, w, dtype="f16", below=below)
    return values, scale


def _launch(launch: KernelCall, w: Packed, **arguments: Any) -> Sequence[jax.Array]:
    from ptx_kernels.kernels.decode import decode

    n, columns = w.shape
    blocks = columns // formats.get(w.format).block_size
    kernel = decode(format=w.format, n=n, blocks=blocks, layers=layers(w), **arguments)
    return launch(kernel, *jax.tree.leaves(w))


_op = Op(
    "dequantize",
    reference,
    shapes=lambda w, *, dtype: jax.ShapeDtypeStruct(w.shape, dtype),
    ptx=ptx,
    layout=lambda *_, **__: Layout(("n k",), "n k"),
)
