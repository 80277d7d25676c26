"""Epochs: an access's time and lane packed in a u64, as race detectors store them.

An epoch is time << 32 | scope << 30 | lane of the batch. For an asynchronous copy, ASYNC | number
of its mbarrier replaces the lane. With lane 0 the epoch is a time stamp. 0 means that nobody
accessed the bytes.
"""

from __future__ import annotations

import numpy as np

LANE_BITS = np.uint64((1 << 30) - 1)
ASYNC = np.uint64(1 << 29)
TIME_SHIFT = np.uint64(32)

#: Scope: the distance between the lanes that share a record. 0: one lane, or several lanes each of
#: which happened before the next; the record holds the last.
LANES, WARPS, BLOCKS = 1, 2, 3
SCOPE_SHIFT, SCOPE_MASK = np.uint64(30), np.uint64(3)


def time_stamp(time: int) -> np.uint64:
    return np.uint64(time << 32)


def scope_of(records: np.ndarray) -> np.ndarray:
    return records >> SCOPE_SHIFT & SCOPE_MASK
