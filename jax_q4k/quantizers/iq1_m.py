"""Quantizer of IQ1_M: 2048 ternary codebook entries, 1.75 bits per weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import codebook, pack
from .codebook import Codes
from .quantizer import Fields


def _fields(codes: Codes) -> Fields:
    nibbles = codebook.high_bits(codes.entries) | (codes.signs << 3)
    d = jax.lax.bitcast_convert_type(codes.d.astype(jnp.float16), jnp.uint16)
    # the four nibbles of d are the top ones of the words that have the scales
    tops = jnp.stack([(d >> shift) << 12 for shift in (0, 4, 8, 12)], axis=-1)
    scales = codes.scales.astype(jnp.uint16).reshape(-1, 4, 4).swapaxes(-1, -2)
    return {
        "qs": codebook.low_bytes(codes.entries),
        "qh": codebook.nibble_scales(nibbles),
        "scales": pack.little_endian(pack.bits(scales, 3) | tops),
    }


QUANTIZER = codebook.quantizer(
    "IQ1_M", _fields, unit=1.0, largest=15 * 7 / 8, subs=16, book="IQ1_S"
)
