"""Simulates `mapa`: addresses in the shared memory of other thread blocks of the cluster.

PTX ISA 9.1, 9.7.9.23.
"""

from __future__ import annotations

import numpy as np

from ..access import Access
from .binding import Call
from .meaning import means


@means("mapa")
def map_address(call: Call, addresses: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    access = Access(call.frame, call.instruction, call.every(addresses), 0, 1)
    return call.batch.cluster.map(access, call.every(ranks))
