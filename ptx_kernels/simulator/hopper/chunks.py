"""Chunks: the 16 bytes by which bulk copies go."""

from __future__ import annotations

import numpy as np

from ..errors import Misaligned
from ..steps.binding import Call

CHUNK = 16  # bytes; sizes and addresses are multiples of it


def in_chunks(call: Call, nbytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Chunks of copies of nbytes[lane] bytes: each one's lane and its offset in the lane's copy.

    The lane is given as position in the frame.
    """
    if (nbytes % CHUNK).any():
        position = int(np.argmax(nbytes % CHUNK != 0))
        what = f"copies {int(nbytes[position])} bytes, which is no multiple of {CHUNK}"
        raise call.fault(Misaligned, position, what)
    lanes = np.repeat(np.arange(call.frame.count), nbytes // CHUNK)
    return lanes, (np.arange(lanes.size) - np.searchsorted(lanes, lanes)) * CHUNK
