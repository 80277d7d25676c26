"""Splits f32 into sums of bf16 (or f16) parts, for tensor-core products of higher precision.

Part i rounds the remainder after the parts before it. Two parts hold 16 bits, three hold 24 (Henry,
Tang and Heinecke 2019, "Leveraging the bfloat16 artificial intelligence datatype").
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ptx import Builder, Value, bf16
from ...ptx.types import Type
from ..vectors import two_floats


def split(k: Builder, pair: Sequence[Value], parts: int, type: Type = bf16) -> list[Value]:
    """Emits the split of two f32 into parts; returns a u32 per part, the first float's part low.

    `type`: bf16, or f16, whose parts hold 11 bits each within its range.
    """
    words: list[Value] = []
    while True:
        low, high = pair
        words.append(k.pair(low, high, type))
        if len(words) == parts:
            return words
        pair = [x - rounded for x, rounded in zip(pair, two_floats(words[-1], type), strict=True)]


def products(a_parts: int, b_parts: int) -> list[tuple[int, int]]:
    """Returns the pairs (i, j) of parts of a and of b whose products matter, the smallest first.

    Products as small as the remainder of either operand are omitted.
    """
    counted = [
        (i, j) for i in range(a_parts) for j in range(b_parts) if i + j < max(a_parts, b_parts)
    ]
    return sorted(counted, key=sum, reverse=True)
