"""Geometry of a launch, and the state of the clusters that run: what instructions work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ptx_kernels.ptx import Kernel

from .code import Code
from .errors import UnknownInstructionFault
from .memory import LOCAL_BYTES, GlobalMemory, SharedMemory
from .operands import Constants, Operands, Reader
from .pending import Copies
from .state import DONE, LANES, Mask, State, lane_masks


@dataclass(frozen=True)
class Shape:
    """Launch geometry: blocks, threads of a block, and blocks of a cluster, each in x, y, z."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]

    @classmethod
    def of(cls, kernel: Kernel) -> Shape:
        def three(sizes: Sequence[int]) -> tuple[int, int, int]:
            x, y, z = (*sizes, 1, 1, 1)[:3]
            return int(x), int(y), int(z)

        return cls(three(kernel.grid), three(kernel.block), three(kernel.cluster))

    @property
    def threads(self) -> int:
        return int(np.prod(self.block))

    @property
    def cluster_size(self) -> int:
        return int(np.prod(self.cluster))

    def clusters(self) -> np.ndarray:
        """Returns the numbers of blocks, (clusters, blocks of a cluster), by rank."""
        numbers = np.arange(int(np.prod(self.grid)))
        x, y, z = self.coordinates(numbers)
        cx, cy, cz = self.cluster
        rank = x % cx + cx * (y % cy + cy * (z % cz))
        row = x // cx + self.grid[0] // cx * (y // cy + self.grid[1] // cy * (z // cz))
        return numbers[np.lexsort((rank, row))].reshape(-1, self.cluster_size)

    def coordinates(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        gx, gy, _ = self.grid
        return numbers % gx, numbers // gx % gy, numbers // (gx * gy)


class Machine:
    """State of a number of whole clusters at a time that run a kernel's code.

    Args:
      reserved, shared_bytes: bytes at the beginning of a block's shared memory that belong to the
        system, and bytes after them.
      late: whether asynchronous copies write only when a thread waits for them, or at once.
    """

    def __init__(
        self,
        code: Code,
        shape: Shape,
        constants: Constants,
        memory: GlobalMemory,
        *,
        clusters: int,
        reserved: int,
        shared_bytes: int,
        late: bool = True,
    ) -> None:
        self.code, self.shape, self.memory, self._late = code, shape, memory, late
        blocks = clusters * shape.cluster_size
        self.warps_per_block = -(-shape.threads // 32)
        self.state = State(blocks * self.warps_per_block)
        self.operands = Operands(self.state, constants)
        self.shared = SharedMemory(blocks, reserved, shared_bytes, shape.cluster_size)
        warps = self.state.warps
        self.lane_numbers = LANES
        self.warp_numbers = np.arange(warps)[None]
        self.thread_numbers = LANES * warps + self.warp_numbers
        self.blocks = self.warp_numbers // self.warps_per_block
        self.arrived = np.zeros((32, warps), bool)
        local = LOCAL_BYTES // 4 if "STL" in _names(code) else 0
        self.local = np.zeros((local, 32, warps), np.uint32)
        self._special = self._thread_registers()

    def _thread_registers(self) -> dict[str, np.ndarray]:
        thread = self.warp_numbers % self.warps_per_block * 32 + LANES
        bx, by, _ = self.shape.block
        found = {
            "SR_TID.X": thread % bx,
            "SR_TID.Y": thread // bx % by,
            "SR_TID.Z": thread // (bx * by),
            "SR_SWINHI": np.ones((1, 1)),
            "SR_CgaSize": np.full((1, 1), self.shape.cluster_size),
        }
        found |= lane_masks()
        for name in ("SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z", "SR_CgaCtaId"):
            found[name] = np.zeros((1, self.state.warps))
        return {name: np.array(value, np.uint32) for name, value in found.items()}

    def special(self, name: str) -> Reader:
        """Returns a reader of a special register.

        Raises:
          UnknownInstructionFault.
        """
        if name not in self._special:
            raise UnknownInstructionFault(f"special register {name}")
        value = self._special[name]
        return lambda: value

    def lanes(self, value: np.ndarray, mask: Mask) -> np.ndarray:
        """Collects the mask's lanes of an array that broadcasts to (32, warps)."""
        whole = np.broadcast_to(value, self.state.counter.shape)
        return whole.ravel() if mask is None else whole[mask]

    def begin(self, clusters: np.ndarray) -> None:
        """Sets the state of the threads before their first instruction."""
        self.state.reset()
        self.shared.reset()
        self.arrived[...] = False
        numbers = clusters.ravel()
        self.shared.members[...] = np.arange(len(numbers)).reshape(clusters.shape)
        self.shared.clusters[...] = np.arange(len(numbers)) // clusters.shape[1]
        of_warps = np.repeat(numbers, self.warps_per_block)
        for axis, coordinate in zip("XYZ", self.shape.coordinates(of_warps), strict=True):
            self._special[f"SR_CTAID.{axis}"][0] = coordinate
        ranks = np.arange(len(numbers)) % clusters.shape[1]
        self._special["SR_CgaCtaId"][0] = np.repeat(ranks, self.warps_per_block)
        thread = self.warp_numbers % self.warps_per_block * 32 + LANES
        self.state.waits[thread >= self.shape.threads] = DONE
        self.copies = Copies(
            self.shared,
            lambda mask: self.lanes(self.thread_numbers, mask),
            self.state.counter.size,
            self._late,
        )


def _names(code: Code) -> set[str]:
    return {instruction.name for instruction in code.instructions}
