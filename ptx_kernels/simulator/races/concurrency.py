"""How far apart two accesses are: in no order as lanes of one warp, as warps of one block, or as
blocks.
"""

from __future__ import annotations

import numpy as np

from ..frame import WARP, Frame
from .happens_before import COPIED, LOWEST_BITS

# In a record, how far apart the lanes were that made it; 0: one lane, or several in order, of which
# it has the last.
LANES, WARPS, BLOCKS = 1, 2, 3
LEVEL, THREE = np.uint64(30), np.uint64(3)
_WARP = np.uint64(WARP)


def distance(frame: Frame, records: np.ndarray, between_blocks: bool) -> np.ndarray | None:
    """How far apart each record's lanes and the frame's are, 0 where they are one or in order;
    None: 0 for all.

    `records` has shape (lanes of the frame, granules), and so has the result.
    """
    order = frame.batch.order
    barred = frame.of_lanes(order.barred)[:, None]
    if not (records.any() if between_blocks else (records >= barred).any()):
        return None
    lanes = frame.all_lanes.astype(np.uint64)[:, None]
    other, level = records & LOWEST_BITS, records >> LEVEL & THREE
    another_lane = (other != lanes) | (level >= LANES)
    another_warp = (other // _WARP != lanes // _WARP) | (level >= WARPS)
    since = frame.of_lanes(order.synced)[:, None]
    if another_warp.any():
        since = np.where(another_warp, _met(frame, other, level, barred), since)
    apart = np.where(another_lane & (records >= since), np.where(another_warp, WARPS, LANES), 0)
    if between_blocks:
        padded = np.uint64(frame.batch.padded)
        another_block = (
            (other // padded != lanes // padded) | (level == BLOCKS) | (records < order.start)
        )
        apart = np.where(another_block, BLOCKS, apart)
    apart = np.where(records != 0, apart, 0).astype(np.uint64)
    if order.acquired is not None and apart.any():
        rows, columns = np.nonzero((apart != 0) & (level == 0))
        some = records[rows, columns]
        known = some < order.horizons(frame.all_lanes[rows], some)
        apart[rows[known], columns[known]] = 0
    return apart


def _met(frame: Frame, other: np.ndarray, level: np.ndarray, barred: np.ndarray) -> np.ndarray:
    """Since when accesses of other warps of the block, those of the records, are not in order with
    the frame's.
    """
    met = frame.batch.order.met
    if met is None:
        return barred
    of_warp = met.shape[1]
    mine = met.reshape(-1, of_warp)[frame.all_lanes // WARP]  # shape (lanes, warps of a block)
    one = np.take_along_axis(mine, (other // _WARP % np.uint64(of_warp)).astype(np.int64), axis=1)
    one = np.where(other & COPIED, np.uint64(0), one)  # copies meet nobody
    return np.maximum(barred, np.where(level >= WARPS, mine.min(axis=1)[:, None], one))


def unproxied(frame: Frame, records: np.ndarray) -> np.ndarray:
    """1 where the record is of an ordinary access that the frame's lanes know of without a proxy
    fence.
    """
    apart = np.where((records != 0) & (records & COPIED == 0), np.uint64(LANES), np.uint64(0))
    rows, columns = np.nonzero((apart != 0) & (records >> LEVEL & THREE == 0))
    some = records[rows, columns]
    known = some < frame.batch.order.horizons(frame.all_lanes[rows], some, proxied=True)
    apart[rows[known], columns[known]] = 0
    return apart


def tell(frame: Frame, position: int, what: str, apart: int, record: np.uint64) -> str:
    """What the lane at this position did with what another one of the record did, in words."""
    lane, several = int(record & LOWEST_BITS), int(record >> LEVEL & THREE)
    mine, batch = int(frame.all_lanes[position]), frame.batch
    if record & COPIED:
        return f"warp {mine % batch.padded // WARP} {what.format('a bulk copy')}, without a wait for its mbarrier"
    if apart == BLOCKS:
        number = int(batch.memory.blocks_of(np.array([int(record) >> 32]), np.array([lane]))[0])
        who = "several blocks" if several == BLOCKS else batch.block_name(number)
        return f"this block {what.format(who)}: blocks run in any order"
    if apart == WARPS:
        who = "several warps" if several == WARPS else f"warp {lane % batch.padded // WARP}"
        return f"warp {mine % batch.padded // WARP} {what.format(who)}, without a barrier between"
    who = "several lanes" if several == LANES else f"lane {lane % WARP}"
    return (
        f"lane {mine % WARP} {what.format(who)}, lanes of one warp, without a warp barrier between"
    )
