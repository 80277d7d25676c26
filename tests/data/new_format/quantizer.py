"""Q4_X: int8 scales for 16 weights of -8 to 7 each, by the largest magnitudes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import pack
from .fit import LARGEST_F16, nearest_f16, reciprocal, rounded
from .quantizer import Fields, Quantizer, as_bytes, searched


def _fields(x: jax.Array, w: jax.Array) -> Fields:
    steps = jnp.abs(x).max(0) / 7  # (2, blocks)
    d = nearest_f16(steps.max(0) / 127)
    scales = rounded(steps * reciprocal(d), 0, 127)
    quants = rounded(x * reciprocal(d * scales), -8, 7)
    return {
        "qs": pack.nibbles(as_bytes(quants + 8).reshape(-1, 32)),
        "d": pack.f16_bytes(d),
        "scales": as_bytes(scales),
    }


QUANTIZER = Quantizer("Q4_X", 7 * 127 * LARGEST_F16, searched("Q4_X", (16, 2), _fields))
