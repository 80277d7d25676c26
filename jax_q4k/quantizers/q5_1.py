"""Quantizer of Q5_1: one scale, one minimum and 32 quants of 0 to 31 per block."""

from __future__ import annotations

import jax

from . import affine, pack
from .fit import LARGEST_F16
from .quantizer import Fields, Quantizer, as_bytes, searched


def _fields(x: jax.Array, w: jax.Array) -> Fields:
    d, m, q = affine.blocks(x, w, 31)
    quants = as_bytes(q)
    return {
        "d": pack.f16_bytes(d),
        "m": pack.f16_bytes(m),
        "qh": pack.fifth_bits(quants),
        "qs": pack.nibbles(quants),
    }


QUANTIZER = Quantizer("Q5_1", LARGEST_F16, searched("Q5_1", (32,), _fields), native=True)
