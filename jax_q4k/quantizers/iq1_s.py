"""Quantizer of IQ1_S: 2048 ternary codebook entries, 1.56 bits per weight."""

from __future__ import annotations

import jax.numpy as jnp

from . import codebook, pack
from .codebook import Codes
from .quantizer import Fields


def _fields(codes: Codes) -> Fields:
    high = (codes.entries >> 8).reshape(-1, 8, 4).swapaxes(-1, -2)
    lowered = codes.signs.reshape(-1, 8, 4)[..., 0].astype(jnp.uint16)
    scales = codes.scales.astype(jnp.uint16)
    return {
        "d": pack.f16_bytes(codes.d),
        "qs": codebook.low_bytes(codes.entries),
        "qh": pack.little_endian(pack.bits(high, 3) | (scales << 12) | (lowered << 15)),
    }


QUANTIZER = codebook.quantizer("IQ1_S", _fields, unit=1.0, largest=15 * 7 / 8, subs=8)
