"""Checks the membermask of a warp instruction against the lanes that execute it.

All members must execute the instruction together, and all executing lanes must be members. Threads
that have exited do not count.
"""

from __future__ import annotations

import numpy as np

from ..errors import ShuffleError
from ..frame import Frame
from ..layout import WARP
from .binding import Call

ALL = 0xFFFFFFFF


def lane_bits(frame: Frame, lanes: np.ndarray) -> np.ndarray:
    """Returns a u32 per warp of the batch whose bits are set for `lanes`, shape (warps,)."""
    flags = np.zeros(frame.layout.lanes, np.bool_)
    flags[lanes] = True
    return np.packbits(flags.reshape(-1, WARP), axis=1, bitorder="little").view("<u4").reshape(-1)


def are_whole_warps(frame: Frame, members: np.ndarray) -> bool:
    """Returns whether the frame has full warps, and all lanes of each are members."""
    return members.size == 1 and int(members[0]) == ALL and frame.whole_warps


def check_members(call: Call, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (membermasks, masks of executing lanes), each per lane: (lanes of the frame,).

    Raises ShuffleError if they disagree.
    """
    frame = call.frame
    lanes, layout = frame.all_lanes, frame.layout
    members = np.broadcast_to(members, lanes.size)
    warps = lanes // WARP
    here = lane_bits(frame, lanes)[warps]
    unnamed = (members >> (lanes % WARP).astype(np.uint32)) & np.uint32(1) == 0
    if unnamed.any():
        position = int(np.argmax(unnamed))
        what = (
            f"lane {int(lanes[position]) % WARP} executes this but "
            f"membermask {int(members[position]):#x} does not name it"
        )
        raise call.fault(ShuffleError, position, what)
    live = lane_bits(frame, np.flatnonzero(layout.exists & ~call.batch.exited))[warps]
    absent = members & live & ~here
    if absent.any():
        position = int(np.argmax(absent != 0))
        what = (
            f"membermask {int(members[position]):#x} names lanes {int(absent[position]):#x}, "
            "which are elsewhere"
        )
        raise call.fault(ShuffleError, position, what)
    _check_agreement(call, members)
    return members, here


def _check_agreement(call: Call, members: np.ndarray) -> None:
    """Raises if a lane and another lane in its membermask have different membermasks."""
    if (members == members[0]).all():
        return
    lanes = call.frame.all_lanes
    masks = np.zeros(call.frame.layout.lanes, np.uint32)
    masks[lanes] = members
    # shape (lanes of the frame, lanes of a warp); 0 for lanes that do not execute
    theirs = masks.reshape(-1, WARP)[lanes // WARP]
    named = members[:, None] >> np.arange(WARP, dtype=np.uint32) & np.uint32(1) == 1
    other = named & (theirs != 0) & (theirs != members[:, None])
    if other.any():
        position = int(np.argmax(other.any(axis=1)))
        lane = int(np.argmax(other[position]))
        what = (
            f"membermask {int(members[position]):#x} names lane {lane}, whose membermask is "
            f"{int(theirs[position, lane]):#x}"
        )
        raise call.fault(ShuffleError, position, what)


def groups(frame: Frame, members: np.ndarray) -> list[np.ndarray]:
    """Returns, for each warp and membermask, the frame positions of its lanes."""
    keys = (frame.all_lanes // WARP).astype(np.uint64) << np.uint64(32) | members.astype(np.uint64)
    return [np.flatnonzero(keys == key) for key in np.unique(keys)]
