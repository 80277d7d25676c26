"""Vector clocks: for each thread, the time up to which its accesses happen before a point.

PTX calls the relation causality order (PTX ISA 9.1, 8.9): program order, barriers, and releases
that an acquire observes, in sequence.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import reduce

import numpy as np

#: Component -> times (stamps of the shadow memory) before which its accesses happened. The key of a
#: block of the grid is its number, with a time per thread, shape (threads, padded to full warps).
#: The key of an asynchronous copy is ~number of its mbarrier, with one time, shape (1,). The
#: dictionary and its arrays are shared, so they are never modified.
Components = dict[Hashable, np.ndarray]


@dataclass(frozen=True, eq=False)
class VectorClock:
    components: Components

    def join(self, other: VectorClock) -> VectorClock:
        """Returns the elementwise maximum of two clocks; `self` if the other adds nothing."""
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
