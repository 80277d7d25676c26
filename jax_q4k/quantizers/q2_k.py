"""Quantizer of Q2_K: sixteen sub-blocks of 16 quants of 0 to 3, with 4-bit scales and minimums."""

from __future__ import annotations

import jax

from . import affine, pack
from .fit import LARGEST_F16
from .quantizer import Fields, Quantizer, as_bytes, searched


def _fields(x: jax.Array, w: jax.Array) -> Fields:
    d, dmin, scale, minimum, q = affine.super_blocks(x, w, 3, 15)
    return {
        "scales": as_bytes(scale) | (as_bytes(minimum) << 4),
        "qs": pack.bits(as_bytes(q).reshape(-1, 2, 4, 32), 2).reshape(-1, 64),
        "d": pack.f16_bytes(d),
        "dmin": pack.f16_bytes(dmin),
    }


QUANTIZER = Quantizer("Q2_K", 15 * LARGEST_F16, searched("Q2_K", (16, 16), _fields), native=True)
