"""Quantizes float arrays to QuantizedArrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from .quantized_array import QuantizedArray


def quantize(w: Any, format: str, importance: Any = None) -> QuantizedArray:
    """Quantizes w (..., k) to a QuantizedArray of that shape, on the default device.

    Minimizes over each block the sum of importance * sqrt(1 + x^2 / (2 * mean x^2)) * (x -
    weight)^2: ggml's objective with an importance matrix. Q8_0 equals ggml's bit for bit and
    ignores the importance. Values already on a grid of the format keep it: bit for bit in Q4_0,
    Q5_0 and Q8_0, within an ulp in other formats if the values determine the grid.

    Args:
      w: (..., k), NumPy or JAX, float32, float16, bfloat16 or float64 (searched in float32).
      format: one of `jax_q4k.quantizers.names()`.
      importance: (k,) non-negative weights of the squared errors; a common factor has no effect.
        A block of zeros counts as uniform. None means uniform.

    Raises:
      ValueError: an unknown format; no axis, an empty one, or a k that is not a multiple of the
        block size; a value that is NaN, infinite or beyond the format's range (the message names
        the first); an importance of another shape, or with negative, NaN or infinite elements.
        TypeError: a dtype that is not listed, a boolean or complex importance, a tracer.
        UnavailableError: IQ1 to IQ3 without the C++ library, which searches their codebooks.
    """
    from .. import quantizers

    packed = quantizers.quantize(w, format, importance)
    return QuantizedArray.from_gguf_bytes(packed, format, np.shape(w))
