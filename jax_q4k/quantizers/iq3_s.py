"""Quantizer of IQ3_S: 512 codebook entries of four values, 3.44 bits per weight."""

from __future__ import annotations

from . import codebook, pack
from .codebook import Codes
from .quantizer import Fields


def _fields(codes: Codes) -> Fields:
    high = codebook.high_bits(codes.entries).reshape(-1, 8, 8)
    return {
        "d": pack.f16_bytes(codes.d),
        "qs": codebook.low_bytes(codes.entries),
        "qh": pack.bits(high.swapaxes(-1, -2), 1),
        "signs": codes.signs,
        "scales": codebook.nibble_scales(codes.scales),
    }


QUANTIZER = codebook.quantizer("IQ3_S", _fields, unit=1.0, largest=31 * 15, subs=8)
