"""Quantizer of Q3_K: sixteen sub-blocks of 16 quants of -4 to 3, with 6-bit scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import pack, symmetric
from .fit import LARGEST_F16
from .quantizer import Fields, Quantizer, as_bytes, searched

_GRID = symmetric.integers(4)


def _fields(x: jax.Array, w: jax.Array) -> Fields:
    d, scale, q = symmetric.super_blocks(x, w, _GRID, 32)
    quants, scales = as_bytes(q + 4), as_bytes(scale + 32)
    scales = [
        pack.bits(scales.reshape(-1, 2, 8), 4),
        pack.bits((scales >> 4).reshape(-1, 4, 4), 2),
    ]
    return {
        "hmask": pack.bits((quants >> 2).reshape(-1, 8, 32), 1),
        "qs": pack.bits(quants.reshape(-1, 2, 4, 32), 2).reshape(-1, 64),
        "scales": jnp.concatenate(scales, axis=-1),
        "d": pack.f16_bytes(d),
    }


QUANTIZER = Quantizer(
    "Q3_K", 31 * 3 * LARGEST_F16, searched("Q3_K", (16, 16), _fields), native=True
)
