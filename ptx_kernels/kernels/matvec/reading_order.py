"""Layout of int8 activations in shared memory, in the order in which lanes read them.

256 activations take 320 bytes, 20 chunks of 16: 16 chunks of values, and four of (scale, sum) in
f32, two groups of 32 each. For activation i, bit 4 (e) is the half of its group, bit 5 (h) one of
two groups, and bits 6 and 7 (p and q) one of four 64:

    values        chunk q + 2p + 4h + 10e for four lanes of 256 weights, q + 4p + 2h + 10e for more
    scale, sum    chunk 8 + q + 10p, group h of the two

Eight lanes read 16 bytes each at a time; the banks span 128 bytes, eight chunks. The lanes' chunks
must therefore differ modulo eight. Consider the bits that distinguish eight lanes:

    four lanes    Q4_K: p, q and the next 256 (20 chunks later); Q6_K: e, q and the next 256
    eight lanes   Q4_K: e, p, q; Q6_K: e, q and the next 256; blocks of 32, one lane each: h, p, q

One of them must be an odd number of chunks, one twice an odd number, and one four times an odd
number. No single order satisfies all five cases. Narrower loads are conflict-free too, because
their lanes are adjacent in a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from ...ptx import Value

SPAN = 256  # activations
SPAN_BYTES = SPAN * 5 // 4

_CHUNK = 16  # bytes: 16 activations, or four f32
_PAIRS = 8 * _CHUNK  # where scales and sums begin

I = TypeVar("I", int, Value)  # noqa: E741


def row_bytes(columns: int) -> int:
    """Returns the bytes of a row of activations in this layout: 320 per 256 activations.

    `columns` is rounded up to a multiple of 256.
    """
    return -(-columns // SPAN) * SPAN_BYTES


def _bytes(weights: dict[int, int], i: I) -> I:
    """Returns the weighted sum of the bits of i, plus the bytes of the spans before i."""
    total = (i >> 8) * SPAN_BYTES
    for bit, weight in weights.items():
        unit = min(1 << bit, weight & -weight)  # a power of two
        total = total + (i >> (bit - unit.bit_length() + 1) & unit) * (weight // unit)
    return total


class ReadingOrder:
    """Byte positions of activations and of their groups' (scale, sum) pairs in a shared-memory row.

    The position of a sum of indices that share no bits is the sum of their positions.
    """

    def __init__(self, lanes: int) -> None:
        h, p = (64, 32) if lanes == 4 else (32, 64)
        self._values = {4: 160, 5: h, 6: p, 7: 16}

    def value(self, i: I) -> I:
        """Returns the byte position of activation i (u32, or an int) of a row."""
        return _bytes(self._values, i) + (i & (_CHUNK - 1))

    def pair(self, i: I) -> I:
        """Returns the byte position of the (scale, sum) of the group that contains activation i."""
        return _bytes({5: 8, 6: 160, 7: 16}, i) + _PAIRS

    def positions(self, i: I) -> tuple[I, I]:
        """Returns the byte positions of activation i and of its group's (scale, sum) pair."""
        return self.value(i), self.pair(i)

    def chunks(self, i: int, count: int) -> Iterator[tuple[int, int]]:
        """Yields (byte position, length) of activations from i on, split at chunks of 16."""
        while count:
            length = min(count, _CHUNK - i % _CHUNK)
            yield self.value(i), length
            i, count = i + length, count - length
