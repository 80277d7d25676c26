"""Splits bulk copies into chunks of 16 bytes, the unit in which they are simulated."""

from __future__ import annotations

import numpy as np

from ..errors import Misaligned
from ..steps.binding import Call

CHUNK = 16  # bytes; sizes and addresses are multiples of it


def in_chunks(call: Call, nbytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Splits copies of nbytes[lane] bytes into chunks; returns the lane and offset of each chunk.

    The lane is a position in the frame. The offset is relative to the lane's copy.
    """
    if (nbytes % CHUNK).any():
        position = int(np.argmax(nbytes % CHUNK != 0))
        what = f"copies {int(nbytes[position])} bytes, which is no multiple of {CHUNK}"
        raise call.fault(Misaligned, position, what)
    lanes = np.repeat(np.arange(call.frame.count), nbytes // CHUNK)
    return lanes, (np.arange(lanes.size) - np.searchsorted(lanes, lanes)) * CHUNK
