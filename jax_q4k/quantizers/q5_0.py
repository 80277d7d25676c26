"""Quantizer of Q5_0: one scale and 32 quants of -16 to 15 per block."""

from __future__ import annotations

import jax

from . import pack, symmetric
from .fit import LARGEST_F16
from .quantizer import Fields, Quantizer, as_bytes, searched


def _fields(x: jax.Array, w: jax.Array) -> Fields:
    d, q = symmetric.blocks(x, w, symmetric.integers(16, minimum=8))
    quants = as_bytes(q + 16)
    return {"d": pack.f16_bytes(d), "qh": pack.fifth_bits(quants), "qs": pack.nibbles(quants)}


QUANTIZER = Quantizer("Q5_0", 15 * LARGEST_F16, searched("Q5_0", (32,), _fields), native=True)
