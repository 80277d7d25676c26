"""What each lane's accesses are in order with, in time: barriers, fences, releases and acquires.

Time counts the barriers and releases of a launch. Most order comes from barriers and is kept in a
few arrays; what an acquire brings is a clock, which barriers hand on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..frame import WARP, Frame
from .vector_clock import (
    NOTHING,
    Clock,
    Horizons,
    Place,
    Places,
    Semantics,
    Strong,
    join_all,
    latest,
)

if TYPE_CHECKING:
    from ..memory.global_memory import GlobalMemory

# A record of an access, and with lane 0 a time stamp: time << 32 | level << 30 | lane of the batch,
# or | COPIED and the number of an mbarrier; 0: nobody
LOWEST_BITS = np.uint64((1 << 30) - 1)
COPIED = np.uint64(1 << 29)
_TIME = np.uint64(32)


def time_stamp(time: int) -> np.uint64:
    return np.uint64(time << 32)


class Fences:
    """What lanes were in order with at their last fence; `time`: then, 0 if there was none, shape
    (lanes,).
    """

    def __init__(self, lanes: int) -> None:
        self.time, self.barred, self.synced = np.zeros((3, lanes), np.uint64)
        self.acquired, self.version = np.zeros((2, lanes), np.int64)
        self.met: list[np.ndarray | None] = []

    def pass_by(self, order: Order, lanes: np.ndarray, now: np.uint64) -> None:
        self.time[lanes] = now
        self.barred[lanes], self.synced[lanes] = order.barred[lanes], order.synced[lanes]
        self.acquired[lanes] = 0 if order.acquired is None else order.acquired[lanes]
        if not self.met or self.met[-1] is not order.met:
            self.met.append(order.met)
        self.version[lanes] = len(self.met) - 1


class Order:
    """Of the lanes of a batch, `padded` to each of its blocks, which have these `numbers` in the
    grid.

    Attributes:
      start: when the batch started; as all times here, a stamp.
      barred, synced: accesses of a lane's block, or of its warp, before this time are in order with
        its own now, shape (lanes,).
      met: the same for warp w with warp v of block b, shape (b, w, v); None until some warps of a
        block pass a barrier.
      acquired: which of `clocks` holds beyond that, shape (lanes,); None until some lane acquires.
    """

    def __init__(self, memory: GlobalMemory, numbers: np.ndarray, padded: int) -> None:
        self.memory, self.numbers, self.padded = memory, numbers, padded
        self.blocks, self.lanes = numbers.size, numbers.size * padded
        self.start = time_stamp(memory.begin(numbers, padded))
        self.barred = np.full(self.lanes, self.start)
        self.synced = self.barred.copy()
        self.met: np.ndarray | None = None
        self.acquired: np.ndarray | None = None
        self.clocks = [NOTHING]
        self._numbers = np.arange(self.lanes, dtype=np.uint64)
        self._stamps: np.ndarray | None = None
        self._fences: dict[
            bool, Fences
        ] = {}  # whether wide -> the last fences of at least that scope
        self._observed: dict[
            tuple[int, bool], Clock
        ] = {}  # what a fence of a lane would acquire, if wide or not

    def stamps(self) -> np.ndarray:
        """Time and lane of each lane's accesses now, for the race checks, shape (lanes,)."""
        if self._stamps is None:
            self._stamps = time_stamp(self.memory.time) | self._numbers
        return self._stamps

    def tick(self) -> np.uint64:
        """A new time, later than all accesses so far."""
        self.memory.time += 1
        self._stamps = None
        return time_stamp(self.memory.time)

    # --- barriers
    # ---------------------------------------------------------------------------------------------------

    def pass_barrier(self, lanes: np.ndarray | None) -> None:
        """These lanes, whole warps, have passed a barrier of their block together; None: all lanes of the batch."""
        now = self.tick()
        if self.acquired is not None:
            lanes_here = np.arange(self.lanes) if lanes is None else lanes
            self._share(lanes_here, lanes_here // self.padded)
        if lanes is None:
            self.barred[:] = self.synced[:] = now
            return
        self.synced[lanes] = now
        here = np.zeros((self.blocks, self.padded // WARP), np.bool_)
        here.reshape(-1)[lanes // WARP] = True
        self.barred.reshape(self.blocks, -1)[here.all(axis=1)] = now
        for block in np.flatnonzero(here.any(axis=1) & ~here.all(axis=1)):
            self._meet(int(block), here[block], now)

    def _meet(self, block: int, members: np.ndarray, now: np.uint64) -> None:
        """Some warps of a block have met: what one of them was in order with, all are now."""
        shape = self.blocks, members.size, members.size
        self.met = (
            np.zeros(shape, np.uint64) if self.met is None else self.met.copy()
        )  # fences keep the old one
        known = np.maximum(
            self.met[block, members].max(axis=0),
            self.barred.reshape(self.blocks, -1, WARP)[block, members].max(),
        )
        known[members] = now
        self.met[block, members] = known

    def pass_warp_barrier(self, lanes: np.ndarray) -> None:
        """These lanes have passed a barrier of their warp together."""
        if self.acquired is not None:
            self._share(lanes, lanes // WARP)
        self.synced[lanes] = self.tick()

    def _share(self, lanes: np.ndarray, groups: np.ndarray) -> None:
        """What one lane of a group has acquired, all have."""
        assert self.acquired is not None
        for group in np.unique(groups[self.acquired[lanes] != 0]):
            members = lanes[groups == group]
            held = np.unique(self.acquired[members])
            if held.size > 1:
                self._hold(members, join_all(self.clocks[i] for i in held))

    # --- releases and acquires --------------------------------------------------------------------------------------

    def clock(self, lane: int) -> Clock:
        """What happens before all that the lane does from now on; time has passed since its last access."""
        known = self._acquired(lane)
        seen = self._horizons(
            lane, self.barred[lane], self.synced[lane], time_stamp(self.memory.time), self.met
        )
        return Clock(latest(known.seen, seen), known.proxied)

    def _fenced(self, lane: int, wide: bool) -> Clock:
        """As `clock`, at the lane's last fence of at least this scope."""
        fences = self._fences.get(wide)
        if fences is None or not fences.time[lane]:
            return NOTHING
        known = self.clocks[fences.acquired[lane]]
        met = fences.met[fences.version[lane]]
        seen = self._horizons(
            lane, fences.barred[lane], fences.synced[lane], fences.time[lane], met
        )
        return Clock(latest(known.seen, seen), known.proxied)

    def _horizons(
        self,
        lane: int,
        barred: np.uint64,
        synced: np.uint64,
        now: np.uint64,
        met: np.ndarray | None,
    ) -> Horizons:
        """What a lane has in order of its own block."""
        block, thread = divmod(lane, self.padded)
        warp = thread // WARP
        known = np.full(self.padded, barred)
        if met is not None:
            np.maximum(known, np.repeat(met[block, warp], WARP), out=known)
        mates = known[warp * WARP : (warp + 1) * WARP]
        np.maximum(mates, synced, out=mates)
        known[thread] = now
        return {int(self.numbers[block]): known}

    def _acquired(self, lane: int) -> Clock:
        return NOTHING if self.acquired is None else self.clocks[self.acquired[lane]]

    def _hold(self, lanes: np.ndarray | int, clock: Clock) -> None:
        if self.acquired is None:
            self.acquired = np.zeros(self.lanes, np.int64)
        self.clocks.append(clock)
        self.acquired[lanes] = len(self.clocks) - 1

    def acquire(self, lane: int, clock: Clock) -> None:
        """The lane goes on after all of this."""
        before = self._acquired(lane)
        after = before.join(clock)
        if after is not before:
            self._hold(lane, after)

    def fence(self, lanes: np.ndarray, wide: bool) -> None:
        """Acquires what these lanes have observed, and lets their accesses from now on release what they have seen."""
        now = self.tick()
        if self._observed:
            for lane in lanes.tolist():
                self.acquire(lane, self._observed.get((lane, wide), NOTHING))
        for scope in (False, True) if wide else (False,):
            self._fences.setdefault(scope, Fences(self.lanes)).pass_by(self, lanes, now)

    def fence_proxy(self, lanes: np.ndarray) -> None:
        """What these lanes have seen, copies that they and whoever comes after them starts see too."""
        self.tick()
        for lane in lanes.tolist():
            clock = self.clock(lane)
            self._hold(lane, Clock(self._acquired(lane).seen, latest(clock.proxied, clock.seen)))

    def released(self, lane: int, semantics: Semantics) -> tuple[Clock, Clock]:
        """What a write of the lane with these semantics leaves: for everyone, and for its block."""
        if semantics.release:
            clock = self.clock(lane)
            return (clock if semantics.wide else NOTHING), clock
        return (self._fenced(lane, True) if semantics.wide else NOTHING), self._fenced(lane, False)

    def observe(self, lane: int, wide: Clock, narrow: Clock, semantics: Semantics) -> None:
        """The lane reads where these were left, for everyone and for its block."""
        both = wide.join(narrow) if semantics.wide else narrow
        if semantics.acquire:
            self.acquire(lane, both)
            return
        for scope, clock in ((True, both), (False, narrow)):
            if clock is not NOTHING:
                self._observed[lane, scope] = self._observed.get((lane, scope), NOTHING).join(clock)

    def synchronize(
        self,
        frame: Frame,
        strong: Strong,
        places: Places,
        owner: int,
        index: np.ndarray,
        width: int,
        turns: np.ndarray,
    ) -> None:
        """Lanes of the frame have accessed items of a memory, one after the other as `turns` has it."""
        semantics, known = strong.semantics, places.known
        if not (semantics.acquire or semantics.release or known or self._fences):
            return
        self.tick()
        for position in turns.tolist():
            lane, key = int(frame.all_lanes[position]), (owner, int(index[position]), width)
            block = int(self.numbers[lane // self.padded])
            if strong.returns and (place := known.get(key)) is not None:
                self.observe(lane, place.wide, place.of_block.get(block, NOTHING), semantics)
            if strong.writes:
                wide, narrow = self.released(lane, semantics)
                if not strong.reads:
                    known.pop(key, None)  # of what was there before nothing is left
                if narrow is not NOTHING:
                    known.setdefault(key, Place()).leave(block, wide, narrow)

    # --- the race checks ask ----------------------------------------------------------------------------------------

    def horizons(
        self, lanes: np.ndarray, records: np.ndarray, *, proxied: bool = False
    ) -> np.ndarray:
        """Time before which accesses of each record's lane are known to each of `lanes` by its clock, both (n,)."""
        known = np.zeros(lanes.size, np.uint64)
        if self.acquired is None:
            return known
        held, others = self.acquired[lanes], (records & LOWEST_BITS).astype(np.int64)
        copied = (records & COPIED) != 0
        keys = np.where(copied, ~(others & ~int(COPIED)), 0)
        keys[~copied] = self.memory.blocks_of(
            (records[~copied] >> _TIME).astype(np.int64), others[~copied]
        )
        threads = np.where(copied, 0, others % self.padded)
        for number in np.unique(held[held != 0]):
            clock = self.clocks[number]
            horizons = clock.proxied if proxied else clock.seen
            mine = np.flatnonzero(held == number)
            for key in np.unique(keys[mine]):
                if (times := horizons.get(int(key))) is not None:
                    these = mine[keys[mine] == key]
                    known[these] = times[threads[these]]
        return known
