"""Quantizer of IQ3_XXS: 256 codebook entries of four values, 3.06 bits per weight."""

from __future__ import annotations

from . import codebook, pack
from .codebook import Codes
from .quantizer import Fields


def _fields(codes: Codes) -> Fields:
    return {
        "d": pack.f16_bytes(codes.d),
        "qs": codebook.low_bytes(codes.entries),
        "signs": pack.little_endian(codebook.signs_and_scales(codes)),
    }


QUANTIZER = codebook.quantizer("IQ3_XXS", _fields, unit=1 / 4, largest=31 * 62 / 4, subs=8)
