"""Partitions numbers over a warp's lanes: reduce-scatter and all-gather within lane groups."""

from __future__ import annotations

from collections.abc import Sequence

from .builder import Builder
from .values import Value


class LanePartition:
    """Distributes `count` numbers over a group of `lanes` adjacent lanes; each group has its own.

    A lane owns `slots` of its group's numbers.

    `lanes` is a power of two. If there are fewer numbers than lanes, adjacent lanes own the same
    number. If the count is not a power of two, the last number is repeated. All 32
    lanes of a warp must take part in the methods.
    """

    def __init__(self, k: Builder, count: int, lanes: int) -> None:
        self._k, self._count, self._lanes = k, count, lanes
        self._padded = 1 << (count - 1).bit_length()
        self.slots, self._alike = max(1, self._padded // lanes), max(1, lanes // self._padded)

    def owner(self, item: int) -> int:
        """Returns the first lane of a group that owns number `item`, in its slot `item % slots`."""
        return item // self.slots * self._alike

    def item(self, slot: int) -> Value:
        """Returns the index of the number that this lane owns in slot `slot`."""
        return self._k.lane_id % self._lanes // self._alike * self.slots + slot

    def reduce_scatter(self, shares: Sequence[Value]) -> list[Value]:
        """Emits the sum of each number's shares over a group; a lane gets the sums that it owns.

        `shares` has one share per number. A butterfly halves the data in each step: each lane of a
        pair sends the sums that the other will own.
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

    def all_gather(self, owned: Sequence[Value]) -> list[Value]:
        """Emits the exchange that gives every lane of a group all numbers; returns them."""
        if self._padded == 1:
            return list(owned)
        lanes = self._lanes
        return [
            self._k.shuffle(owned[i % self.slots], self.owner(i), lanes=lanes)
            for i in range(self._count)
        ]
