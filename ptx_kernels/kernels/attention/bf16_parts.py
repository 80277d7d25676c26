"""Floats as sums of bf16, whose products on tensor cores are as exact as a sum has parts.

Part i is the rounding of what the parts before it leave: two hold 16 bits, three 24 (Henry, Tang
and Heinecke 2019, "Leveraging the bfloat16 artificial intelligence datatype").
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ptx import Builder, Value, bf16, u32
from ...ptx.types import Type
from ..vectors import two_floats


def split(k: Builder, pair: Sequence[Value], parts: int, type: Type = bf16) -> list[Value]:
    """Words (u32) of the parts of two f32, the first float's in the low half.

    `type`: bf16, or f16, whose parts hold 11 bits each of what its range has room for.
    """
    words: list[Value] = []
    while True:
        low, high = pair
        words.append(k.instruction(f"cvt.rn.{type}x2.f32", high, low).bits(u32))
        if len(words) == parts:
            return words
        pair = [x - rounded for x, rounded in zip(pair, two_floats(words[-1], type), strict=True)]


def products(a_parts: int, b_parts: int) -> list[tuple[int, int]]:
    """The products (i, j) of parts of a and of b that count, the smallest first.

    Those are left out that are as small as what the parts of either leave.
    """
    counted = [
        (i, j) for i in range(a_parts) for j in range(b_parts) if i + j < max(a_parts, b_parts)
    ]
    return sorted(counted, key=sum, reverse=True)
