"""The happens-before relation between accesses: barriers, fences, releases and acquires.

Most of the relation comes from barriers and is stored in a few arrays of times. An acquire adds a
vector clock, which barriers pass on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np

from ..access import Located
from ..layout import WARP, Layout
from .epoch import ASYNC, LANE_BITS, TIME_SHIFT, time_stamp
from .fences import Fences
from .releases import Released, Releases
from .strong import Semantics, Strong
from .timeline import Timeline
from .vector_clock import NOTHING, Components, VectorClock, join_all


class HappensBefore:
    """The happens-before relation for the lanes of one batch of thread blocks.

    Attributes:
      start: time stamp of the batch's start. All times in this class are stamps.
      barred, synced: accesses of a lane's thread block (barred) or warp (synced) before this time
        happen before the lane's accesses from now on, shape (lanes,).
      clustered: the same for a lane's cluster, shape (lanes,).
      met: the same for warp w with warp v of thread block b, shape (b, w, v); None until only some
        warps of a thread block pass a barrier.
      acquired: index into `clocks` of the vector clock that the lane has acquired in addition,
        shape (lanes,); None until some lane acquires.
    """

    def __init__(self, timeline: Timeline, layout: Layout) -> None:
        self.timeline, self.layout = timeline, layout
        self.start = time_stamp(timeline.begin(layout.numbers, layout.padded))
        self.barred = np.full(layout.lanes, self.start)
        self.synced, self.clustered = self.barred.copy(), self.barred.copy()
        self.met: np.ndarray | None = None
        self.acquired: np.ndarray | None = None
        self.clocks = [NOTHING]
        self._numbers = np.arange(layout.lanes, dtype=np.uint64)
        self._stamps: np.ndarray | None = None
        self._fences: dict[bool, Fences] = {}  # wide -> last fences of at least that scope
        #: (lane, wide) -> what a fence of the lane would acquire
        self._observed: dict[tuple[int, bool], VectorClock] = {}

    def stamps(self) -> np.ndarray:
        """Returns the epochs of accesses that lanes make now, shape (lanes,)."""
        if self._stamps is None:
            self._stamps = time_stamp(self.timeline.now) | self._numbers
        return self._stamps

    def tick(self) -> np.uint64:
        """Advances time; returns a time later than all accesses so far."""
        self._stamps = None
        return time_stamp(self.timeline.tick())

    # --- barriers ---

    def pass_barrier(self, lanes: np.ndarray | None) -> None:
        """Orders lanes by a barrier of their thread block; `lanes`: full warps, None means all."""
        now = self.tick()
        layout = self.layout
        if self.acquired is not None:
            lanes_here = layout.lane_numbers if lanes is None else lanes
            self._share(lanes_here, lanes_here // layout.padded)
        if lanes is None:
            self.barred[:] = self.synced[:] = now
            return
        self.synced[lanes] = now
        here = np.zeros((layout.blocks, layout.padded // WARP), np.bool_)
        here.reshape(-1)[lanes // WARP] = True
        self.barred.reshape(layout.blocks, -1)[here.all(axis=1)] = now
        for block in np.flatnonzero(here.any(axis=1) & ~here.all(axis=1)):
            self._meet(int(block), here[block], now)

    def _meet(self, block: int, members: np.ndarray, now: np.uint64) -> None:
        """Orders some warps of a thread block: accesses before one of them are before all."""
        blocks = self.layout.blocks
        shape = blocks, members.size, members.size
        # fences keep the old array
        self.met = np.zeros(shape, np.uint64) if self.met is None else self.met.copy()
        known = np.maximum(
            self.met[block, members].max(axis=0),
            self.barred.reshape(blocks, -1, WARP)[block, members].max(),
        )
        known[members] = now
        self.met[block, members] = known

    def pass_cluster_barrier(self, lanes: np.ndarray | None) -> None:
        """Orders lanes by a barrier of their cluster.

        `lanes`: the live lanes of complete clusters; None means all.
        """
        now = self.tick()
        if self.acquired is not None:
            lanes_here = self.layout.lane_numbers if lanes is None else lanes
            self._share(lanes_here, self.layout.cluster_of_lane[lanes_here])
        where = slice(None) if lanes is None else lanes
        self.barred[where] = self.synced[where] = self.clustered[where] = now

    def pass_warp_barrier(self, lanes: np.ndarray) -> None:
        """Orders these lanes by a barrier of their warp."""
        if self.acquired is not None:
            self._share(lanes, lanes // WARP)
        self.synced[lanes] = self.tick()

    def _share(self, lanes: np.ndarray, groups: np.ndarray) -> None:
        """Gives all lanes of a group the join of the vector clocks that they have acquired."""
        assert self.acquired is not None
        for group in np.unique(groups[self.acquired[lanes] != 0]):
            members = lanes[groups == group]
            held = np.unique(self.acquired[members])
            if held.size > 1:
                self._hold(members, join_all(self.clocks[i] for i in held))

    # --- releases and acquires ---

    def clock(self, lane: int) -> VectorClock:
        """Returns the vector clock of all accesses that happen before the lane's next accesses.

        Time must have advanced since the lane's last access.
        """
        now = time_stamp(self.timeline.now)
        own = self._own(
            lane, self.barred[lane], self.synced[lane], self.clustered[lane], now, self.met
        )
        return self.known(lane).join(own)

    def _fenced(self, lane: int, wide: bool) -> VectorClock:
        """Returns the lane's vector clock at its last fence of at least this scope."""
        fences = self._fences.get(wide)
        if fences is None or not fences.time[lane]:
            return NOTHING
        met = fences.met[fences.version[lane]]
        own = self._own(
            lane,
            fences.barred[lane],
            fences.synced[lane],
            fences.clustered[lane],
            fences.time[lane],
            met,
        )
        return self.clocks[fences.acquired[lane]].join(own)

    def _own(
        self,
        lane: int,
        barred: np.uint64,
        synced: np.uint64,
        clustered: np.uint64,
        now: np.uint64,
        met: np.ndarray | None,
    ) -> VectorClock:
        """Returns the vector clock due to barriers: of the lane's thread block and its cluster."""
        block, thread = divmod(lane, self.layout.padded)
        warp = thread // WARP
        known = np.full(self.layout.padded, barred)
        if met is not None:
            np.maximum(known, np.repeat(met[block, warp], WARP), out=known)
        mates = known[warp * WARP : (warp + 1) * WARP]
        np.maximum(mates, synced, out=mates)
        known[thread] = now
        size = self.layout.cluster_size
        mates_of = range(block // size * size, block // size * size + size)
        components: Components = {
            int(self.layout.numbers[mate]): np.full(self.layout.padded, clustered)
            for mate in mates_of
            if mate != block
        }
        components[int(self.layout.numbers[block])] = known
        return VectorClock(components)

    def known(self, lane: int) -> VectorClock:
        """Returns the vector clock that the lane has acquired."""
        return NOTHING if self.acquired is None else self.clocks[self.acquired[lane]]

    def _hold(self, lanes: np.ndarray | int, clock: VectorClock) -> None:
        if self.acquired is None:
            self.acquired = np.zeros(self.layout.lanes, np.int64)
        self.clocks.append(clock)
        self.acquired[lanes] = len(self.clocks) - 1

    def acquire(self, lane: int, clock: VectorClock) -> None:
        """Makes all accesses in the vector clock happen before the lane's next accesses."""
        before = self.known(lane)
        after = before.join(clock)
        if after is not before:
            self._hold(lane, after)

    def fence(self, lanes: np.ndarray, wide: bool) -> None:
        """Passes a fence: lanes acquire the releases they observed; their later writes release.

        `wide`: the fence's scope reaches beyond the thread block.
        """
        now = self.tick()
        if self._observed:
            for lane in lanes.tolist():
                self.acquire(lane, self._observed.get((lane, wide), NOTHING))
        for scope in (False, True) if wide else (False,):
            fences = self._fences.setdefault(scope, Fences(self.layout.lanes))
            fences.pass_by(
                lanes, now, self.barred, self.synced, self.clustered, self.acquired, self.met
            )

    def released(self, lane: int, semantics: Semantics) -> tuple[VectorClock, VectorClock]:
        """Returns the vector clocks that a lane's write releases: (to all blocks, to its own)."""
        if semantics.release:
            clock = self.clock(lane)
            return (clock if semantics.wide else NOTHING), clock
        return (self._fenced(lane, True) if semantics.wide else NOTHING), self._fenced(lane, False)

    def observe(
        self, lane: int, wide: VectorClock, narrow: VectorClock, semantics: Semantics
    ) -> None:
        """Handles a lane's read of a word at which vector clocks were released.

        `wide` was released to all thread blocks, `narrow` to the lane's own. An acquiring read
        acquires them now, another at the lane's next fence.
        """
        both = wide.join(narrow) if semantics.wide else narrow
        if semantics.acquire:
            self.acquire(lane, both)
            return
        for scope, clock in ((True, both), (False, narrow)):
            if clock is not NOTHING:
                self._observed[lane, scope] = self._observed.get((lane, scope), NOTHING).join(clock)

    def synchronize(
        self, at: Located, strong: Strong, releases: Releases, turns: np.ndarray
    ) -> None:
        """Applies releases and acquires of strong accesses, one lane at a time in `turns` order."""
        semantics, known = strong.semantics, releases.known
        if not (semantics.acquire or semantics.release or known or self._fences):
            return
        self.tick()
        lanes = at.frame.all_lanes
        for position in turns.tolist():
            lane, key = int(lanes[position]), (at.origin, int(at.items[position]), at.width)
            block = int(self.layout.numbers[lane // self.layout.padded])
            if strong.returns and (left := known.get(key)) is not None:
                self.observe(lane, left.wide, left.of_block.get(block, NOTHING), semantics)
            if strong.writes:
                wide, narrow = self.released(lane, semantics)
                if not strong.reads:
                    known.pop(key, None)  # the previous releases of the word are lost
                if narrow is not NOTHING:
                    known.setdefault(key, Released()).leave(block, wide, narrow)

    # --- queries of the race checks ---

    def known_times(
        self,
        lanes: np.ndarray,
        records: np.ndarray,
        component: Callable[[int], Hashable] = lambda key: key,
    ) -> np.ndarray:
        """Returns times (n,) before which the recorded accesses happen before `lanes` (n,).

        Only the acquired vector clocks of `lanes` count. `component` maps the component of a
        record's lane to the component to look up.
        """
        known = np.zeros(lanes.size, np.uint64)
        if self.acquired is None:
            return known
        held, others = self.acquired[lanes], (records & LANE_BITS).astype(np.int64)
        copied = (records & ASYNC) != 0
        keys = np.where(copied, ~(others & ~int(ASYNC)), 0)
        keys[~copied] = self.timeline.blocks_of(
            (records[~copied] >> TIME_SHIFT).astype(np.int64), others[~copied]
        )
        threads = np.where(copied, 0, others % self.layout.padded)
        for number in np.unique(held[held != 0]):
            components = self.clocks[number].components
            mine = np.flatnonzero(held == number)
            for key in np.unique(keys[mine]):
                if (times := components.get(component(int(key)))) is not None:
                    these = mine[keys[mine] == key]
                    known[these] = times[threads[these]]
        return known
