"""Quantizer of IQ2_XS: 512 codebook entries, 2.31 bits per weight."""

from __future__ import annotations

import jax.numpy as jnp

from . import codebook, pack
from .codebook import Codes
from .quantizer import Fields


def _fields(codes: Codes) -> Fields:
    return {
        "d": pack.f16_bytes(codes.d),
        "qs": pack.little_endian(codes.entries | (codes.signs.astype(jnp.uint16) << 9)),
        "scales": codebook.nibble_scales(codes.scales),
    }


QUANTIZER = codebook.quantizer("IQ2_XS", _fields, unit=1 / 8, largest=31 * 43 / 8, subs=16)
