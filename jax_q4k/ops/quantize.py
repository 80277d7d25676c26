"""Quantizes float arrays to QuantizedArrays."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ptx_kernels import formats

from ..arrays import QuantizedArray
from ..sharding.layout import Layout, Rows
from . import checks
from .op import Op
from .vmaps import by_examples, by_rows


def quantize(w: Any, format: str, importance: Any = None) -> QuantizedArray:
    """Quantizes w (..., k) to a QuantizedArray of that shape.

    Minimizes over each block the sum of importance * sqrt(1 + x^2 / (2 * mean x^2)) * (x -
    weight)^2: ggml's objective with an importance matrix. Q8_0 equals ggml's bit for bit and
    ignores the importance. Values already on a grid of the format keep it: bit for bit in Q4_0,
    Q5_0 and Q8_0, within an ulp in other formats if the values determine the grid.

    Arrays with values are quantized on the CPU, and the result is on the default device. Inside
    `jit` and `vmap` the same search becomes a part of the program, of which XLA may round
    intermediate results otherwise, so that some bytes differ. Values cannot be checked there: a
    block with a value that would be refused has bytes of 255, so its weights are NaN or infinite.
    Under `jax.eval_shape` nothing is computed. There is no derivative.

    Args:
      w: (..., k), NumPy or JAX, float32, float16, bfloat16 or float64 (searched in float32).
      format: one of `jax_q4k.quantizers.names()`.
      importance: (k,) non-negative weights of the squared errors; a common factor has no effect.
        A block of zeros counts as uniform. None means uniform.

    Raises:
      ValueError: an unknown format; no axis, an empty one, or a k that is not a multiple of the
        block size; a value that is NaN, infinite or beyond the format's range (the message names
        the first); an importance of another shape, or with negative, NaN or infinite elements.
        TypeError: a dtype that is not listed, a boolean or complex importance; traced arguments
        of a format whose quantizer cannot be traced, when the program is lowered.
        UnavailableError: IQ1 to IQ3 without the C++ library, which searches their codebooks.
    """
    from .. import quantizers

    w, importance = checks.value(w), checks.value(importance)
    if not any(isinstance(argument, jax.core.Tracer) for argument in (w, importance)):
        packed = quantizers.quantize(w, format, importance)
        return QuantizedArray.from_gguf_bytes(packed, format, np.shape(w))
    block = quantizers.checked_format(format)
    w = jnp.asarray(w)
    quantizers.check_weights(w, block)
    operands: tuple[jax.Array, ...] = (w,)
    if importance is not None:
        importance = jnp.asarray(importance)
        quantizers.check_importance(importance, w.shape[-1])
        operands = (w, importance)
    rows = Rows.of(w)
    packed = _op.bind(rows.merge(w), *operands[1:], format=format)
    planes: QuantizedArray = jax.tree.map(rows.split, packed)
    return planes


def reference(w: jax.Array, *importance: jax.Array, format: str) -> QuantizedArray:
    """`quantize` of w (m, k) in plain JAX."""
    from .. import quantizers

    block = formats.get(format)
    packed = quantizers.traced(w.astype(jnp.float32), format, *importance)
    return QuantizedArray(format, w.shape, block.split(packed, jnp))


_op = Op(
    "quantize",
    reference,
    shapes=lambda w, *_, format: QuantizedArray.abstract(format, w.shape),
    vmap=functools.partial(by_rows, otherwise=by_examples),
    layout=lambda _, *importance, format: Layout(("m k", *["k"] * len(importance)), "m k"),
)
