"""Vector clocks: per thread, the time up to which its accesses happen before a point of a program.

PTX calls the relation causality order (PTX ISA 9.1, 8.9): program order, barriers, and a release
that an acquire observes, each after the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import reduce

import numpy as np

#: Component -> times, as stamps of the shadow memory, before which its accesses happened. A block
#: of the grid has its number as key and a time per thread, shape (threads, padded to whole warps).
#: An asynchronous copy has ~number of what counts its bytes, and one time, shape (1,). Neither the
#: dictionary nor its arrays are changed once they are made: many hold them.
Components = dict[Hashable, np.ndarray]


@dataclass(frozen=True, eq=False)
class VectorClock:
    components: Components

    def join(self, other: VectorClock) -> VectorClock:
        """All that one or the other knows; `self` where that is nothing new."""
        mine, theirs = self.components, other.components
        if mine is theirs or not theirs:
            return self
        if not mine:
            return other
        both: Components | None = None
        for key, times in theirs.items():
            known = mine.get(key)
            if known is times:
                continue
            both = dict(mine) if both is None else both
            both[key] = times if known is None else np.maximum(known, times)
        return self if both is None else VectorClock(both)


NOTHING = VectorClock({})


def join_all(clocks: Iterable[VectorClock]) -> VectorClock:
    return reduce(VectorClock.join, clocks, NOTHING)
