"""Clocks: which accesses happen before a point of a program, and what is left at a place in memory
for who looks.

PTX calls it causality order (PTX ISA 9.1, 8.9): program order, barriers, and a release that an
acquire observes, each after the other. A release is an access with that word, or a fence before
one; an acquire likewise, or a fence after one. Both must have a scope that includes the other's
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

#: Time before which accesses are in order, as stamps of the shadow memory: of a block of the grid
#: per thread, shape (threads, padded to whole warps); of the copies that mbarrier number m counts
#: under the key ~m, shape (1,). Neither the dictionary nor its arrays are changed once they are
#: made: many hold them.
Horizons = dict[int, np.ndarray]


def latest(one: Horizons, other: Horizons) -> Horizons:
    """All that one or the other knows."""
    if one is other or not other:
        return one
    if not one:
        return other
    both: Horizons | None = None
    for key, theirs in other.items():
        mine = one.get(key)
        if mine is theirs:
            continue
        both = dict(one) if both is None else both
        both[key] = theirs if mine is None else np.maximum(mine, theirs)
    return one if both is None else both


@dataclass(frozen=True)
class Clock:
    """`seen`: accesses that happen before a point; `proxied`: those with a fence.proxy.async on the
    way there.
    """

    seen: Horizons
    proxied: Horizons

    def join(self, other: Clock) -> Clock:
        if other is self or other is NOTHING:
            return self
        seen, proxied = latest(self.seen, other.seen), latest(self.proxied, other.proxied)
        return self if seen is self.seen and proxied is self.proxied else Clock(seen, proxied)


NOTHING = Clock({}, {})


def join_all(clocks: Iterable[Clock]) -> Clock:
    return reduce(Clock.join, clocks, NOTHING)


@dataclass(frozen=True)
class Semantics:
    """What an access or a fence does besides; `wide`: its scope reaches beyond the block."""

    acquire: bool = False
    release: bool = False
    wide: bool = True


def semantics_of(opcode: str) -> Semantics:
    """A launch has no clusters of several blocks, so that `.cluster` is as narrow as `.cta`."""
    parts = opcode.split(".")
    return Semantics(
        acquire="acquire" in parts or "acq_rel" in parts,
        release="release" in parts or "acq_rel" in parts,
        wide="cta" not in parts and "cluster" not in parts,
    )


#: (items of a memory, item of each lane, its position in the frame, turns) -> what each lane found
#: there before; turns: positions among these lanes in the order in which they are served
Change = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Strong:
    """An access that may meet others without a race: atomic updates, and loads and stores with an
    order.

    Attributes:
      returns: whether the thread learns what it found.
    """

    change: Change
    semantics: Semantics = Semantics()
    reads: bool = True
    writes: bool = True
    returns: bool = True


def unchanged(
    view: np.ndarray, index: np.ndarray, positions: np.ndarray, turns: np.ndarray
) -> np.ndarray:
    return view[index]


@dataclass
class Place:
    """What releases have left at a word of memory: for everyone, and for threads of one block of
    the grid.
    """

    wide: Clock = NOTHING
    of_block: dict[int, Clock] = field(default_factory=dict)

    def leave(self, block: int, wide: Clock, narrow: Clock) -> None:
        self.wide = self.wide.join(wide)
        self.of_block[block] = self.of_block.get(block, NOTHING).join(narrow)


@dataclass
class Places:
    """The places of one memory, by owner (a buffer's address), item and width of an item."""

    known: dict[tuple[int, int, int], Place] = field(default_factory=dict)

    def overwrite(self, owner: int, index: np.ndarray, width: int) -> None:
        """A store without order: whoever reads what it left learns nothing of what happened
        before.
        """
        for other, item, size in list(self.known):
            if (
                other == owner
                and (
                    ((index + 1) * width > item * size) & (index * width < (item + 1) * size)
                ).any()
            ):
                del self.known[other, item, size]
