"""Simulates votes, matches and reductions over a warp, activemask, and the warp barrier."""

from __future__ import annotations

import numpy as np

from ..layout import WARP
from .atomics import REDUCTIONS
from .binding import Call
from .meaning import means
from .members import ALL, are_whole_warps, check_members, groups, lane_bits


@means("vote.sync")
def vote(call: Call, holds: np.ndarray, members: np.ndarray) -> np.ndarray:
    if holds.size == 1 and are_whole_warps(call.frame, members):
        votes = np.where(holds, np.uint32(ALL), np.uint32(0))
        everyone = np.full(1, ALL, np.uint32)
    else:
        members, here = check_members(call, members)
        lanes = call.frame.all_lanes
        votes = lane_bits(call.frame, lanes[call.every(holds)])[lanes // WARP] & members
        everyone = members & here
    match call.words["mode"]:
        case "any":
            return votes != 0
        case "all":
            return votes == everyone
        case "uni":
            return (votes == 0) | (votes == everyone)
    return votes


@means("redux.sync")
def redux(call: Call, value: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Returns the reduction over all member lanes, in each of them."""
    value, reduce = call.every(value), REDUCTIONS[call.words["op"]].reduce
    result = np.empty(value.size, value.dtype)
    for positions in groups(call.frame, check_members(call, members)[0]):
        result[positions] = reduce(value[positions])
    return result


@means("match")
def match_lanes(
    call: Call, value: np.ndarray, members: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (mask of the matching member lanes, whether there are any).

    match.any gives the member lanes with the same value. match.all gives all member lanes if they
    agree, else none.
    """
    value, everyone = call.every(value), call.words["mode"] == "all"
    own = np.uint32(1) << (call.frame.all_lanes % WARP).astype(np.uint32)
    result = np.zeros(call.frame.count, np.uint32)
    for positions in groups(call.frame, check_members(call, members)[0]):
        distinct = np.unique(value[positions])
        for key in distinct if not everyone else distinct[: distinct.size == 1]:
            same = positions[value[positions] == key]
            result[same] = np.bitwise_or.reduce(own[same])
    return result, result != 0


@means("activemask")
def active_mask(call: Call) -> np.ndarray:
    lanes = call.frame.all_lanes
    return lane_bits(call.frame, lanes)[lanes // WARP]


@means("bar.warp.sync")
def warp_barrier(call: Call, members: np.ndarray) -> None:
    if not are_whole_warps(call.frame, members):
        check_members(call, members)
    call.batch.happens_before.pass_warp_barrier(call.frame.all_lanes)
