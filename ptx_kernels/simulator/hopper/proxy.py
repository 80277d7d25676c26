"""Simulates the async proxy: bulk copies see threads' writes only after a `fence.proxy.async`.

PTX ISA 9.1, 9.7.13.5 defines it. Accesses that a lane has seen through such a fence are extra
components of its vector clock.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..access import Located
from ..errors import MissingProxyFence
from ..frame import Frame
from ..memory.shared_memory import SharedMemory
from ..races.conflicts import Kind
from ..races.epoch import ASYNC, LANE_BITS, LANES, scope_of
from ..races.happens_before import HappensBefore
from ..races.vector_clock import Components, VectorClock
from ..steps.binding import Call
from ..steps.meaning import means


class Proxied(NamedTuple):
    """Key of a vector clock's component: accesses of a thread block that the async proxy sees."""

    block: int


def fence_proxy(happens_before: HappensBefore, lanes: np.ndarray) -> None:
    """Makes accesses that lanes have seen visible to copies started by them, or by later lanes."""
    happens_before.tick()
    for lane in lanes.tolist():
        seen = happens_before.clock(lane).components
        proxied: Components = {
            Proxied(key): times for key, times in seen.items() if isinstance(key, int)
        }
        happens_before.acquire(lane, VectorClock(proxied))


def check_start(shared: SharedMemory, kind: Kind, at: Located) -> None:
    """Raises if a bulk copy may not start to write ("write") or read ("fetch") its shared bytes."""
    shared.guard(at, "writes" if kind == "write" else "reads")
    happens_before = shared.context.happens_before

    def past_fence(other: Kind, records: np.ndarray, what: str) -> None:
        if other != "fetch":
            _check_proxy(shared, at, other, records, f"this copy {what}")

    shared.shadow.check(happens_before, kind, at, past_fence)
    if shared.context.traffic is not None:
        shared.context.traffic.count_shared(at)


def _check_proxy(
    shared: SharedMemory, at: Located, kind: Kind, records: np.ndarray, what: str
) -> None:
    """Raises if the async proxy cannot see accesses that happen before the copy."""
    happens_before = shared.context.happens_before
    apart = _unproxied(happens_before, at.frame, records)
    apart = shared.shadow.singly(happens_before, at, kind, records, apart, _unproxied)
    if apart.any():
        position = int(np.argmax(apart.any(axis=1)))
        record = records[position, np.argmax(apart[position])]
        thread = int(record & LANE_BITS) % at.frame.layout.padded
        told = f"{what.format(f'thread {thread}')}, without a fence.proxy.async between"
        raise at.fault(MissingProxyFence, position, told)


def _unproxied(happens_before: HappensBefore, frame: Frame, records: np.ndarray) -> np.ndarray:
    """Returns scope LANES for records of accesses that the async proxy does not see, else 0."""
    ordinary = (records != 0) & (records & ASYNC == 0)
    apart = np.where(ordinary, np.uint64(LANES), np.uint64(0))
    rows, columns = np.nonzero(ordinary & (scope_of(records) == 0))
    some = records[rows, columns]
    known = some < happens_before.known_times(frame.all_lanes[rows], some, Proxied)
    apart[rows[known], columns[known]] = 0
    return apart


@means("fence.proxy.async", synchronizes=True)
def fence_async(call: Call) -> None:
    fence_proxy(call.batch.happens_before, call.frame.all_lanes)


@means("fence.mbarrier_init", synchronizes=True)
def fence_init(call: Call) -> None:
    """Does nothing: other thread blocks of a cluster, for which the fence is, see no mbarrier."""
