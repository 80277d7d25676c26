"""Quantizer of Q4_1: one scale, one minimum and 32 quants of 0 to 15 per block."""

from __future__ import annotations

import jax

from . import affine, pack
from .fit import LARGEST_F16
from .quantizer import Fields, Quantizer, as_bytes, searched


def _fields(x: jax.Array, w: jax.Array) -> Fields:
    d, m, q = affine.blocks(x, w, 15)
    return {"d": pack.f16_bytes(d), "m": pack.f16_bytes(m), "qs": pack.nibbles(as_bytes(q))}


QUANTIZER = Quantizer("Q4_1", LARGEST_F16, searched("Q4_1", (32,), _fields), native=True)
