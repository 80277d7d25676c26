"""Quantizer of IQ2_XXS: 256 codebook entries, 2.06 bits per weight."""

from __future__ import annotations

import jax.numpy as jnp

from . import codebook, pack
from .codebook import Codes
from .quantizer import Fields


def _fields(codes: Codes) -> Fields:
    entries = codebook.low_bytes(codes.entries).reshape(-1, 8, 4)
    words = pack.little_endian(codebook.signs_and_scales(codes)).reshape(-1, 8, 4)
    qs = jnp.concatenate([entries, words], axis=-1).reshape(-1, 64)
    return {"d": pack.f16_bytes(codes.d), "qs": qs}


QUANTIZER = codebook.quantizer("IQ2_XXS", _fields, unit=1 / 8, largest=31 * 43 / 8, subs=8)
