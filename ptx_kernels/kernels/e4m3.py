"""fp8 of the kind e4m3fn (sign, 4 bits of exponent with bias 7, 3 of mantissa, no infinity) in plain instructions.

The conversions of the PTX ISA need sm_89. Layout: Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ptx import Builder, Value, f32, s32, u32

LARGEST = 448.0
_NAN = 0x7F
_REBIAS = 2.0**120  # f32's bias of 127 against 7
_SMALLEST_NORMAL = 2.0**-6
_ALIGN = 2.0**14  # an f32 of this size has units of 2^-9, those of e4m3's subnormal numbers


def decode(k: Builder, words: Sequence[Value]) -> list[Value]:
    """The bytes of u32 words, lowest first, as f32: exact; the codes 0x7f and 0xff give NaN."""
    values = []
    for word in words:
        for shift in (24, 16, 8, 0):
            # the arithmetic shift keeps the sign in bit 31 and puts exponent and mantissa where f32 has them
            bits = (word << shift if shift else word).bits(s32) >> 4
            value = (bits.bits(u32) & 0x87F00000).bits(f32) * _REBIAS
            beyond = k.instruction("abs.f32", value) > LARGEST
            values.append(k.select(beyond, k.const(f32, float("nan")), value))
    return values


def encode(k: Builder, x: Value) -> Value:
    """An f32 rounded to nearest even, as a u32 below 256; beyond +-448 it saturates, NaN stays NaN."""
    magnitude = k.minimum(k.instruction("abs.f32", x), LARGEST)
    bits = magnitude.bits(u32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (magnitude + _ALIGN).bits(u32) & 0xF
    code = k.select(magnitude < _SMALLEST_NORMAL, subnormal, normal)
    is_nan = k.instruction("setp.neu.f32", x, x)
    return k.select(is_nan, k.const(u32, _NAN), code) | ((x.bits(u32) >> 24) & 0x80)
