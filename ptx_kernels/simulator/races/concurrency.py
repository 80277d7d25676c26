"""Finds concurrent accesses: neither happens before the other at the needed scope (block, GPU)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..frame import Frame
from ..layout import WARP
from .epoch import (
    ASYNC,
    BLOCKS,
    LANE_BITS,
    LANES,
    SCOPE_MASK,
    SCOPE_SHIFT,
    WARPS,
    scope_of,
)
from .happens_before import HappensBefore

_WARP = np.uint64(WARP)


class AsyncWriter(NamedTuple):
    """Description of an agent that writes asynchronously, for race reports.

    `missing`: the synchronization that later accesses lack.
    """

    name: str
    missing: str


def concurrency(
    happens_before: HappensBefore, frame: Frame, records: np.ndarray, between_blocks: bool
) -> np.ndarray | None:
    """Returns the scope at which each recorded access is concurrent with the frame's lane.

    The scope is LANES, WARPS or BLOCKS, or 0 if both are of one lane or one happens before the
    other. None means 0 for all. `records` and the result have shape (lanes of the frame, granules).
    """
    barred = frame.of_lanes(happens_before.barred)[:, None]
    if not (records.any() if between_blocks else (records >= barred).any()):
        return None
    lanes = frame.all_lanes.astype(np.uint64)[:, None]
    other, scope = records & LANE_BITS, scope_of(records)
    another_lane = (other != lanes) | (scope >= LANES)
    another_warp = (other // _WARP != lanes // _WARP) | (scope >= WARPS)
    since = frame.of_lanes(happens_before.synced)[:, None]
    if another_warp.any():
        since = np.where(another_warp, _met(happens_before, frame, other, scope, barred), since)
    apart = np.where(another_lane & (records >= since), np.where(another_warp, WARPS, LANES), 0)
    if between_blocks:
        padded = np.uint64(frame.layout.padded)
        another_block = (
            (other // padded != lanes // padded)
            | (scope == BLOCKS)
            | (records < happens_before.start)
        )
        if frame.layout.cluster_size > 1:
            # for a record of several blocks, the log of single accesses decides
            another_block &= (scope == BLOCKS) | ~_of_cluster(happens_before, frame, records)
        apart = np.where(another_block, BLOCKS, apart)
    apart = np.where(records != 0, apart, 0).astype(np.uint64)
    if happens_before.acquired is not None and apart.any():
        rows, columns = np.nonzero((apart != 0) & (scope == 0))
        some = records[rows, columns]
        known = some < happens_before.known_times(frame.all_lanes[rows], some)
        apart[rows[known], columns[known]] = 0
    return apart


def _of_cluster(happens_before: HappensBefore, frame: Frame, records: np.ndarray) -> np.ndarray:
    """Returns the mask of records from the lane's cluster that precede its last cluster barrier."""
    lanes = np.uint64(frame.layout.padded * frame.layout.cluster_size)
    mine = frame.all_lanes.astype(np.uint64)[:, None] // lanes
    before = frame.of_lanes(happens_before.clustered)[:, None]
    together: np.ndarray = (records & LANE_BITS) // lanes == mine
    return together & (records >= happens_before.start) & (records < before)


def _met(
    happens_before: HappensBefore,
    frame: Frame,
    other: np.ndarray,
    scope: np.ndarray,
    barred: np.ndarray,
) -> np.ndarray:
    """Returns the times from which accesses of the records' warps are concurrent with the lanes."""
    met = happens_before.met
    if met is None:
        return barred
    of_warp = met.shape[1]
    mine = met.reshape(-1, of_warp)[frame.all_lanes // WARP]  # shape (lanes, warps of a block)
    one = np.take_along_axis(mine, (other // _WARP % np.uint64(of_warp)).astype(np.int64), axis=1)
    one = np.where(other & ASYNC, np.uint64(0), one)  # copies pass no barrier
    return np.maximum(barred, np.where(scope >= WARPS, mine.min(axis=1)[:, None], one))


def report(
    happens_before: HappensBefore,
    frame: Frame,
    position: int,
    what: str,
    apart: int,
    record: np.uint64,
    writer: AsyncWriter | None,
) -> str:
    """Returns the description of a race: the access at `position` and the recorded access."""
    layout = frame.layout
    lane, several = int(record & LANE_BITS), int(record >> SCOPE_SHIFT & SCOPE_MASK)
    mine = int(frame.all_lanes[position])
    warp = f"warp {mine % layout.padded // WARP}"
    if record & ASYNC:
        assert writer is not None
        return f"{warp} {what.format(writer.name)}, without {writer.missing}"
    if apart == BLOCKS:
        times = np.array([int(record) >> 32])
        number = int(happens_before.timeline.blocks_of(times, np.array([lane]))[0])
        who = "several blocks" if several == BLOCKS else layout.block_name(number)
        together = lane // (layout.padded * layout.cluster_size)
        mates = together == mine // (layout.padded * layout.cluster_size)
        if layout.cluster_size > 1 and mates and record >= happens_before.start:
            return f"this block {what.format(who)}, without a barrier of their cluster between"
        return f"this block {what.format(who)}: blocks run in any order"
    if apart == WARPS:
        who = "several warps" if several == WARPS else f"warp {lane % layout.padded // WARP}"
        return f"{warp} {what.format(who)}, without a barrier between"
    who = "several lanes" if several == LANES else f"lane {lane % WARP}"
    return (
        f"lane {mine % WARP} {what.format(who)}, lanes of one warp, without a warp barrier between"
    )
