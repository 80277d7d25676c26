"""Converts between fp8 e4m3fn and f32 or f16 with ordinary PTX instructions.

The type has a sign, 4 bits of exponent with bias 7, 3 bits of mantissa and no infinity. The
conversions of the PTX ISA need sm_89. Layout: Micikevicius et al. 2022, "FP8 Formats for Deep
Learning".
"""

from __future__ import annotations

from ...ptx import Builder, Value, u32
from .packed_words import Words, f16_of

LARGEST = 448.0
UNIT = 2.0**8  # scale of a decoded value: f16's exponent bias of 15 against 7
_NAN = 0x7F
_SMALLEST_NORMAL = 2.0**-6
_ALIGN = 2.0**14  # an f32 of this size has units of 2^-9, like e4m3's subnormals


def decode(words: Words) -> list[Value]:
    """Emits the decoding of the four fp8 in each u32, lowest first, to exact f32 in units of UNIT.

    0x7f and 0xff give NaN.
    """
    values = []
    for word in words:
        even, odd = halves(word)
        values += [f16_of(even), f16_of(odd), f16_of(even, 1), f16_of(odd, 1)]
    return values


def halves(word: Value) -> tuple[Value, Value]:
    """Emits the decoding of bytes 0 and 2 of a u32, then 1 and 3, to f16 pairs in units of UNIT.

    The f16 are exact.
    """
    return _as_f16(word << 8, word << 7), _as_f16(word, word >> 1)


def _as_f16(sign: Value, rest: Value) -> Value:
    """Emits the conversion of two fp8 to two f16.

    `sign` has each sign in bit 15 of a half, `rest` the other seven bits in bits 13 to 7.
    """
    magnitude = rest & 0x3F803F80
    # all ones carry into the one exponent bit that is clear
    is_nan = (magnitude + 0x00800080) & 0x40004000
    return magnitude | is_nan | (sign & 0x80008000)


def encode(k: Builder, x: Value) -> Value:
    """Emits the conversion of an f32 to fp8, rounded to nearest even; returns a u32 below 256.

    Saturates beyond +-448; NaN stays NaN.
    """
    magnitude = k.minimum(k.abs(x), LARGEST)
    bits = magnitude.bits(u32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (magnitude + _ALIGN).bits(u32) & 0xF
    code = k.select(magnitude < _SMALLEST_NORMAL, subnormal, normal)
    is_nan = k.is_nan(x)
    return k.select(is_nan, k.const(u32, _NAN), code) | ((x.bits(u32) >> 24) & 0x80)
