"""Registers, predicates and program counters of the warps that run together.

Arrays have shape (32, warps): lane, then warp, so that operations run over warps. A warp's uniform
registers have shape (1, warps) and broadcast. A mask of None means all lanes of all warps.
"""

from __future__ import annotations

import numpy as np

Mask = np.ndarray | None

RUNS, AT_CONVERGENCE, AT_BARRIER, AT_WARP_SYNC, AT_CLUSTER, DONE = range(6)
LANES = np.arange(32, dtype=np.int64)[:, None]
BITS = (np.uint32(1) << LANES.astype(np.uint32)).astype(np.uint32)


def bits_of(mask: np.ndarray) -> np.ndarray:
    """Packs a mask (32, warps) to a word per warp (warps,)."""
    return np.bitwise_or.reduce(np.where(mask, BITS, np.uint32(0)), axis=0)


def lane_masks() -> dict[str, np.ndarray]:
    """Returns special registers with the lane's number, and masks of lanes relative to it."""
    below = BITS - np.uint32(1)
    return {
        "SR_LANEID": LANES.astype(np.uint32),
        "SR_EQMASK": BITS,
        "SR_LTMASK": below,
        "SR_LEMASK": below | BITS,
        "SR_GTMASK": ~(below | BITS),
        "SR_GEMASK": ~below,
    }


class State:
    """State of `warps` warps.

    Attributes:
      registers: (256, 32, warps) uint32, `predicates`: (8, 32, warps) bool.
      uniform: (256, 1, warps), `uniform_predicates`: (8, 1, warps).
      convergence: (16, 32, warps) uint32, the lanes that meet at a BSYNC, as each lane knows them.
      counter: index of each thread's next instruction.
      waits: one of RUNS to DONE; `waits_for`: number of the barrier or convergence register.
    """

    def __init__(self, warps: int) -> None:
        self.warps = warps
        self.registers = np.empty((256, 32, warps), np.uint32)
        self.predicates = np.empty((8, 32, warps), bool)
        self.uniform = np.empty((256, 1, warps), np.uint32)
        self.uniform_predicates = np.empty((8, 1, warps), bool)
        self.convergence = np.empty((16, 32, warps), np.uint32)
        self.counter = np.empty((32, warps), np.int32)
        self.waits = np.empty((32, warps), np.int8)
        self.waits_for = np.empty((32, warps), np.int64)
        self.reset()

    def reset(self) -> None:
        """Begins again; registers hold a pattern that no correct kernel reads."""
        self.registers[...] = 0xDEADBEEF
        self.uniform[...] = 0xDEADBEEF
        self.predicates[...] = False
        self.uniform_predicates[...] = False
        self.predicates[7] = self.uniform_predicates[7] = True
        self.convergence[...] = 0
        self.counter[...] = 0
        self.waits[...] = RUNS
        self.waits_for[...] = 0
