"""Simulates shfl.sync: each lane reads a register of another member lane. PTX ISA 9.1, 9.7.9.6."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import ShuffleError
from ..layout import WARP
from .binding import Call
from .meaning import means
from .members import are_whole_warps, check_members

_LANE = np.arange(WARP, dtype=np.int64)


def shuffle_source(mode: str, lane: np.ndarray, b: Any, c: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns (source lane, whether it is in range) as the PTX ISA defines, int64, broadcast."""
    step, clamp, segment = b & 31, c & 31, c >> 8 & 31
    highest = (lane & segment) | (clamp & ~segment)
    lowest = lane & segment
    if mode == "up":
        source = lane - step
        inside = source >= highest
    else:
        source = {"down": lane + step, "bfly": lane ^ step, "idx": lowest | (step & ~segment)}[mode]
        inside = source <= highest
    return np.where(inside, source, lane), inside


@lru_cache(maxsize=1024)
def _uniform_source(mode: str, b: int, c: int) -> tuple[np.ndarray, np.ndarray]:
    return shuffle_source(mode, _LANE, np.int64(b), np.int64(c))


@means("shfl.sync")
def shuffle(
    call: Call, value: np.ndarray, b: np.ndarray, c: np.ndarray, members: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Returns (the value that each lane reads, whether its source is in range)."""
    mode, frame = call.words["mode"], call.frame
    if not are_whole_warps(frame, members):
        return _shuffle_some(call, mode, value, b, c, members)
    if b.size > 1 or c.size > 1:
        lanes = frame.all_lanes % WARP
        source, inside = shuffle_source(mode, lanes, b.astype(np.int64), c.astype(np.int64))
        start = np.arange(frame.count) // WARP * WARP
        return (value if value.size == 1 else value[start + source]), inside
    source, inside = _uniform_source(mode, int(b[0]), int(c[0]))
    if value.size > 1:
        value = value.reshape(-1, WARP).take(source, axis=1).reshape(-1)
    return (value, np.tile(inside, frame.count // WARP)) if call.pair else (value,)


def _shuffle_some(
    call: Call, mode: str, value: np.ndarray, b: np.ndarray, c: np.ndarray, members: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Shuffles if not all lanes of the warps are members; returns as `shuffle`."""
    members, here = check_members(call, members)
    lanes, layout = call.frame.all_lanes, call.frame.layout
    source, inside = shuffle_source(mode, lanes % WARP, b.astype(np.int64), c.astype(np.int64))
    source, inside = np.broadcast_to(source, lanes.size), np.broadcast_to(inside, lanes.size)
    readable = (members & here) >> source.astype(np.uint32) & np.uint32(1) == 1
    if not readable.all():
        position = int(np.argmin(readable))
        lane = int(lanes[position]) // WARP * WARP + int(source[position])
        gone = call.batch.exited[lane] or not layout.exists[lane]
        what = (
            f"lane {int(lanes[position]) % WARP} reads lane {int(source[position])}, which "
            f"{'has exited' if gone else 'does not take part'}"
        )
        raise call.fault(ShuffleError, position, what)
    where = np.zeros(layout.lanes, np.int64)
    where[lanes] = np.arange(lanes.size)
    return (value if value.size == 1 else value[where[lanes // WARP * WARP + source]]), inside
