"""Several numbers dealt to the lanes that together make them, so that each lane goes on with a few
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .values import Value

if TYPE_CHECKING:
    from .builder import Builder


class Dealt:
    """`count` numbers, dealt to groups of `lanes` neighbours (a power of two): a lane has `slots`
    of its group's.

    With fewer numbers than lanes, neighbours have the same. Where the count is no power of two, the
    last number stands in for those that are missing. All 32 lanes of a warp take part in what
    follows.
    """

    def __init__(self, k: Builder, count: int, lanes: int) -> None:
        self._k, self._count, self._lanes = k, count, lanes
        self._padded = 1 << (count - 1).bit_length()
        self.slots, self._alike = max(1, self._padded // lanes), max(1, lanes // self._padded)

    def lane(self, item: int) -> int:
        """The first lane of a group that has a number, in its slot `item % slots`."""
        return item // self.slots * self._alike

    def item(self, slot: int) -> Value:
        """Which number this lane has in a slot."""
        return self._k.lane_id % self._lanes // self._alike * self.slots + slot

    def sum(self, shares: Sequence[Value]) -> list[Value]:
        """The sums over a group of each lane's shares, one for each number, dealt.

        A butterfly that halves what is left: each lane of a pair gives away the sums that will be
        the other's.
        """
        k, mask = self._k, self._lanes // 2
        mine = [*shares, *[shares[-1]] * (self._padded - self._count)]
        while mask:
            given = mine
            if len(mine) > 1:
                pairs = list(zip(mine[: len(mine) // 2], mine[len(mine) // 2 :], strict=True))
                upper = k.lane_id & mask != 0
                mine, given = (
                    [k.select(upper, b, a) for a, b in pairs],
                    [k.select(upper, a, b) for a, b in pairs],
                )
            mine = [a + k.shuffle_xor(b, mask) for a, b in zip(mine, given, strict=True)]
            mask //= 2
        return mine

    def all(self, dealt: Sequence[Value]) -> list[Value]:
        """Every number, in every lane of the group."""
        if self._padded == 1:
            return list(dealt)
        lanes = self._lanes
        return [
            self._k.shuffle(dealt[i % self.slots], self.lane(i), lanes=lanes)
            for i in range(self._count)
        ]
