"""Q8_0: ggml's bytes, which know no importance."""

from __future__ import annotations

import numpy as np

from .fit import LARGEST_F16
from .quantizer import Quantizer


def _blocks(x: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """float32 (blocks, 32) -> uint8 (blocks, 34).

    d = largest magnitude / 127 and q = x * (1 / d), halves away from zero, all in float32. In
    NumPy, since XLA may multiply by a reciprocal where a division is written.
    """
    d = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    scaled = x * np.divide(1, d, out=np.zeros_like(d), where=d >= np.finfo(np.float32).tiny)
    quants = np.trunc(scaled)
    quants += np.copysign(np.abs(scaled - quants) >= 0.5, scaled)
    return np.concatenate(
        [d.astype("<f2").view(np.uint8), quants.astype(np.int8).view(np.uint8)], axis=-1
    )


QUANTIZER = Quantizer("Q8_0", 127 * LARGEST_F16, _blocks)
