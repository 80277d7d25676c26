"""Quantizer of Q4_K: eight sub-blocks of 32 quants of 0 to 15, with 6-bit scales and minimums."""

from __future__ import annotations

import functools

import jax

from . import affine, pack
from .fit import LARGEST_F16
from .quantizer import Fields, Quantizer, as_bytes, searched


def fields(x: jax.Array, w: jax.Array, top: int) -> Fields:
    """Returns the blocks' fields as bytes, for quants of 0 to `top`, 15 (Q4_K) or 31 (Q5_K).

    Only Q5_K stores `qh`.
    """
    d, dmin, scale, minimum, q = affine.super_blocks(x, w, top)
    quants = as_bytes(q)
    return {
        "d": pack.f16_bytes(d),
        "dmin": pack.f16_bytes(dmin),
        "scales": pack.k_scales(as_bytes(scale), as_bytes(minimum)),
        "qh": pack.bits(quants >> 4, 1),
        "qs": pack.k_low_bits(quants),
    }


QUANTIZER = Quantizer(
    "Q4_K",
    63 * LARGEST_F16,
    searched("Q4_K", (32, 8), functools.partial(fields, top=15)),
    native=True,
)
