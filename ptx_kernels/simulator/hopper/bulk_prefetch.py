"""Simulates `cp.async.bulk.prefetch.L2`: no effect, but the bytes must lie inside a buffer.

PTX ISA 9.1, 9.7.9.25.4.4 defines the instruction.
"""

from __future__ import annotations

import numpy as np

from ..access import Access
from ..steps.binding import Call, Place
from ..steps.meaning import means
from .chunks import CHUNK, in_chunks


@means("cp.async.bulk.prefetch.L2")
def prefetch(call: Call, source: Place, size: np.ndarray, policy: np.ndarray | None = None) -> None:
    """Checks each lane's address range. `policy` is a cache hint and is ignored."""
    lanes, steps = in_chunks(call, call.every(size))
    if not lanes.size:
        return
    addresses = call.every(source.addresses)[lanes] + steps.astype(np.uint64)
    some = call.frame.subset(lanes)
    call.batch.memory.check(Access(some, call.instruction, addresses, source.offset, CHUNK))
