"""Converts floats to the types F32, F16 and BF16, whose blocks are single values."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .. import float_types
from .quantizer import Quantizer


def _quantizer(type: str) -> Quantizer:
    dtype = float_types.GGML[type].dtype

    def blocks(x: np.ndarray, importance: np.ndarray) -> np.ndarray:
        return x.astype(dtype).view(np.uint8)

    return Quantizer(type, float(ml_dtypes.finfo(dtype).max), blocks, native=True)


QUANTIZERS = {type: _quantizer(type) for type in float_types.GGML}
