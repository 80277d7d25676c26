"""Quantizer of IQ2_S: 1024 codebook entries, 2.56 bits per weight."""

from __future__ import annotations

import jax.numpy as jnp

from . import codebook, pack
from .codebook import Codes
from .quantizer import Fields


def _fields(codes: Codes) -> Fields:
    high = codebook.high_bits(codes.entries).reshape(-1, 8, 4)
    return {
        "d": pack.f16_bytes(codes.d),
        "qs": jnp.concatenate([codebook.low_bytes(codes.entries), codes.signs], axis=-1),
        "qh": pack.bits(high.swapaxes(-1, -2), 2),
        "scales": codebook.nibble_scales(codes.scales),
    }


QUANTIZER = codebook.quantizer("IQ2_S", _fields, unit=1 / 8, largest=31 * 43 / 8, subs=16)
