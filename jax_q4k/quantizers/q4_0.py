"""Quantizer of Q4_0: one scale and 32 quants of -8 to 7 per block."""

from __future__ import annotations

import jax

from . import pack, symmetric
from .fit import LARGEST_F16
from .quantizer import Fields, Quantizer, as_bytes, searched


def _fields(x: jax.Array, w: jax.Array) -> Fields:
    d, q = symmetric.blocks(x, w, symmetric.integers(8, minimum=4))
    return {"d": pack.f16_bytes(d), "qs": pack.nibbles(as_bytes(q + 8))}


QUANTIZER = Quantizer("Q4_0", 7 * LARGEST_F16, searched("Q4_0", (32,), _fields), native=True)
