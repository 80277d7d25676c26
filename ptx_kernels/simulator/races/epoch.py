"""Epoch of an access: its time and its lane in one number, as race detectors keep them.

A u64, with lane 0 a time stamp: time << 32 | scope << 30 | lane of the batch, or | ASYNC and the
number of what counts an asynchronous copy's bytes. 0: nobody.
"""

from __future__ import annotations

import numpy as np

LANE_BITS = np.uint64((1 << 30) - 1)
ASYNC = np.uint64(1 << 29)
TIME_SHIFT = np.uint64(32)

#: Scope: how far apart the lanes were that share a record; 0: one lane, or several of which each
#: happened before the next, and the record has the last.
LANES, WARPS, BLOCKS = 1, 2, 3
SCOPE_SHIFT, SCOPE_MASK = np.uint64(30), np.uint64(3)


def time_stamp(time: int) -> np.uint64:
    return np.uint64(time << 32)


def scope_of(records: np.ndarray) -> np.ndarray:
    return records >> SCOPE_SHIFT & SCOPE_MASK
