"""Extracts packed quants and scales from u32 registers, and converts them to floats."""

from __future__ import annotations

from collections.abc import Sequence

from ...ptx import Builder, Value, f16, f32, s32, u16, u32
from ...ptx.types import f16x2

Words = Sequence[Value]  # adjacent u32


def f16_of(word: Value, which: int = 0) -> Value:
    """Emits the conversion of the low (0) or high (1) f16 of a u32 to f32."""
    return (word >> 16 if which else word).to(u16).bits(f16).to(f32)


def byte_floats(k: Builder, words: Words) -> list[Value]:
    """Emits the conversion of the u8 in each word, lowest byte first, to f32."""
    return [k.bit_field(word, 8 * i, 8).to(f32) for word in words for i in range(4)]


def affine(values: Sequence[Value], scale: Value, offset: Value) -> list[Value]:
    """Emits scale * v - offset for each value, with both roundings, like the NumPy decoders."""
    return [scale * v - offset for v in values]


def signed_byte_floats(k: Builder, words: Words) -> list[Value]:
    """Emits the conversion of the int8 in each word, lowest byte first, to f32."""
    return [k.bit_field(word.bits(s32), 8 * i, 8).to(f32) for word in words for i in range(4)]


def shifted(word: Value, left: int) -> Value:
    """Emits a left shift of the word, or a right shift if `left` is negative."""
    return word << left if left > 0 else word >> -left if left < 0 else word


def upper_nibbles(words: Words) -> tuple[Words, Words]:
    """Emits words of all bytes' low nibbles, then the high ones, in the upper halves of bytes."""
    return [(w << 4) & 0xF0F0F0F0 for w in words], [w & 0xF0F0F0F0 for w in words]


def lower_nibbles(words: Words) -> tuple[Words, Words]:
    """Emits words of all bytes' low nibbles, then the high ones, in the lower halves of bytes."""
    return [w & 0x0F0F0F0F for w in words], [(w >> 4) & 0x0F0F0F0F for w in words]


def looked_up(k: Builder, table: Sequence[int], words: Words) -> tuple[Words, Words]:
    """Emits a lookup in a table of 16 int8 by all bytes' low nibbles, then by the high ones.

    A permutation selects from eight entries by three bits; the fourth bit then selects between two
    results.
    """
    a, b, c, d = (
        k.const(u32, int.from_bytes(bytes(entry & 0xFF for entry in table[i : i + 4]), "little"))
        for i in range(0, 16, 4)
    )
    low, high = [], []
    for word in words:
        selectors, upper = word & 0x77777777, ((word >> 1) & 0x44444444) | 0x32103210
        mixed = []  # entries of two bytes: low, high, low, high
        for shift in (0, 16):
            at = shifted(selectors, -shift)
            halves = k.permute(a, b, at), k.permute(c, d, at)
            mixed.append(k.permute(halves[0], halves[1], shifted(upper, -shift)))
        low.append(k.permute(mixed[0], mixed[1], 0x6420))
        high.append(k.permute(mixed[0], mixed[1], 0x7531))
    return low, high


#: Offset that `anchored_floats` adds to each quant.
ANCHOR = 128.0


def anchored_floats(k: Builder, words: Words) -> list[Value]:
    """Emits the conversion of the u8 below 128 in each word, lowest byte first, to f32 plus ANCHOR.

    Each takes one instruction: the byte becomes the upper seven bits of the mantissa of an f32 with
    exponent 2^7.
    """
    exponent = k.const(u32, 0x43000000)
    return [
        k.permute(word, exponent, 0x7044 | i << 8).bits(f32) for word in words for i in range(4)
    ]


def signed_floats(k: Builder, words: Words) -> list[Value]:
    """Emits the exact conversion of the int8 in each word, lowest byte first, to f32.

    It goes via 2^23 + 128 + value.
    """
    exponent = k.const(u32, 0x4B000000)
    flipped = [word ^ 0x80808080 for word in words]
    biased = [k.permute(word, exponent, 0x7440 | i) for word in flipped for i in range(4)]
    return [word.bits(f32) - (2.0**23 + 128) for word in biased]


def signed_byte_halves(k: Builder, word: Value) -> tuple[Value, Value]:
    """Emits the conversion of a word's int8 in bytes 0 and 2, then 1 and 3, to pairs of f16.

    The result is exact, via 2^10 + 128 + value: the byte becomes the lower eight bits of the
    mantissa of an f16 with exponent 2^10.
    """
    exponent, anchor = k.const(u32, 0x64646464), k.const(u32, 0x64806480).bits(f16x2)
    flipped = word ^ 0x80808080
    even, odd = (k.permute(flipped, exponent, which).bits(f16x2) for which in (0x4240, 0x4341))
    return (even - anchor).bits(u32), (odd - anchor).bits(u32)
