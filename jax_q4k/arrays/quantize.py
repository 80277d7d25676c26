"""Quantizes float arrays to QuantizedArrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from .quantized_array import QuantizedArray


def quantize(w: Any, format: str, importance: Any = None) -> QuantizedArray:
    """Quantizes w (..., k) to a QuantizedArray of that shape, on the default device.

    Like `jax_q4k.quantizers.quantize`, with the same arguments and errors, but returns a
    QuantizedArray instead of bytes.
    """
    from .. import quantizers

    packed = quantizers.quantize(w, format, importance)
    return QuantizedArray.from_gguf_bytes(packed, format, np.shape(w))
