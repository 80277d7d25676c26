"""Where int8 activations lie in a block's shared memory: in the order in which lanes read them.

256 activations take 320 bytes, 20 chunks of 16: their values take 16, and four are of (scale, sum)
of f32, two groups of 32 each. Of activation i, e = bit 4 of i says which half of its group it is
in, h = bit 5 which of two groups, p and q = bits 6 and 7 which of four 64:

    values        chunk q + 2p + 4h + 10e for four lanes of 256 weights, q + 4p + 2h + 10e for more
    scale, sum    chunk 8 + q + 10p, group h of the two

Eight lanes read 16 bytes each at a time, from 128 bytes of banks; these are eight places. So that
all differ by more than a multiple of eight chunks, of what tells eight lanes apart

    four lanes    Q4_K: p, q and the next 256 (20 chunks on); Q6_K: e, q and the next 256
    eight lanes   Q4_K: e, p, q; Q6_K: e, q and the next 256; blocks of 32, a lane each: h, p, q

one is odd, one twice an odd number of chunks, and one four times. No order of this kind serves all
five. Narrower loads follow: their lanes lie side by side in a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from ...ptx import Value

SPAN = 256  # activations
SPAN_BYTES = SPAN * 5 // 4

_CHUNK = 16  # bytes: of an activation each, or of four f32
_PAIRS = 8 * _CHUNK  # where scales and sums begin

I = TypeVar("I", int, Value)  # noqa: E741


def row_bytes(columns: int) -> int:
    """Bytes of a row of activations, a whole number of spans."""
    return -(-columns // SPAN) * SPAN_BYTES


def _bytes(weights: dict[int, int], i: I) -> I:
    """The bytes that weights give the bits of i below a span, and those of the spans before."""
    total = (i >> 8) * SPAN_BYTES
    for bit, weight in weights.items():
        unit = min(1 << bit, weight & -weight)  # a power of two
        total = total + (i >> (bit - unit.bit_length() + 1) & unit) * (weight // unit)
    return total


class ReadingOrder:
    """Places, in bytes, of activations and of their groups' pairs.

    Those of a sum whose terms share no bits are the sums of the terms' places.
    """

    def __init__(self, lanes: int) -> None:
        h, p = (64, 32) if lanes == 4 else (32, 64)
        self._values = {4: 160, 5: h, 6: p, 7: 16}

    def value(self, i: I) -> I:
        """Of activation i (u32, or an integer) of a row."""
        return _bytes(self._values, i) + (i & (_CHUNK - 1))

    def pair(self, i: I) -> I:
        """Of the (scale, sum) of the group that activation i is in."""
        return _bytes({5: 8, 6: 160, 7: 16}, i) + _PAIRS

    def places(self, i: I) -> tuple[I, I]:
        """Of activation i, and of its group's pair."""
        return self.value(i), self.pair(i)

    def chunks(self, i: int, count: int) -> Iterator[tuple[int, int]]:
        """(place, activations) of `count` neighbours in turn, which lie in chunks of 16."""
        while count:
            length = min(count, _CHUNK - i % _CHUNK)
            yield self.value(i), length
            i, count = i + length, count - length
