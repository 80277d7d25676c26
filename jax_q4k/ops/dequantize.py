"""Packed weights as floats."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ptx_kernels import formats
from ptx_kernels.kernels.decode import decode

from ..custom_call import ptx_name
from . import checks
from .op import KernelCall, Op


def dequantize(w: Any, dtype: Any = jnp.float32, *, implementation: str | None = None) -> jax.Array:
    """The weights of `w` as floats: ggml's values exactly in float32, rounded to nearest in other
    dtypes.

    Args:
      w: QuantizedArray (n, k).
      dtype: float32, bfloat16 or float16.
      implementation: `ptx`, `native`, `xla` or `sim`; None takes what `jax_q4k.implementation`
        selected.

    Returns:
      (n, k) of `dtype`.

    Raises:
      TypeError: `w` is no QuantizedArray, or another dtype. ValueError: `w` has not two axes.
    """
    w = checks.matrix("w", w)
    dtype = checks.float_dtype("dtype", dtype)
    if w.shape[0] == 0:
        return jnp.zeros(w.shape, dtype)
    (out,) = _op.bind(*w.planes, format=w.format, dtype=dtype, implementation=implementation)
    return out


def reference(*planes: jax.Array, format: str, dtype: Any) -> list[jax.Array]:
    """`dequantize` in plain JAX."""
    return [formats.get(format).decode(planes, jnp).astype(dtype)]


def kernels(launch: KernelCall, *planes: jax.Array, format: str, dtype: Any) -> list[jax.Array]:
    """`dequantize` by PTX kernels."""
    n, blocks, _ = planes[0].shape
    return launch(decode(format=format, n=n, blocks=blocks, dtype=ptx_name(dtype)), *planes)


def _abstract_eval(*planes: Any, format: str, dtype: Any) -> list[jax.core.ShapedArray]:
    n, blocks, _ = planes[0].shape
    return [jax.core.ShapedArray((n, blocks * formats.get(format).block_size), dtype)]


_op = Op("dequantize", abstract_eval=_abstract_eval, reference=reference, kernels=kernels)
