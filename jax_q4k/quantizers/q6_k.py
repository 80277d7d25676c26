"""Quantizer of Q6_K: sixteen sub-blocks of 16 quants of -32 to 31, with int8 scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import pack, symmetric
from .fit import LARGEST_F16
from .quantizer import Fields, Quantizer, as_bytes, searched

_GRID = symmetric.integers(32, minimum=17, fractions=4)


def _fields(x: jax.Array, w: jax.Array) -> Fields:
    d, scale, q = symmetric.super_blocks(x, w, _GRID, 128)
    quants = as_bytes(q + 32)
    return {
        "ql": pack.bits(quants.reshape(-1, 2, 2, 64), 4).reshape(-1, 128),
        "qh": pack.bits(quants.reshape(-1, 2, 4, 32) >> 4, 2).reshape(-1, 64),
        "scales": jax.lax.bitcast_convert_type(scale.T.astype(jnp.int8), jnp.uint8),
        "d": pack.f16_bytes(d),
    }


QUANTIZER = Quantizer(
    "Q6_K", 127 * 31 * LARGEST_F16, searched("Q6_K", (16, 16), _fields), native=True
)
