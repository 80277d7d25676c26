"""Numbers the lanes of thread blocks that are simulated together."""

from __future__ import annotations

import numpy as np

from .errors import SimulationError
from .text.program import Instruction

WARP = 32

Extent = tuple[int, int, int]


class Layout:
    """Lane numbering of some thread blocks of the grid, each padded to full warps.

    Attributes:
      kernel: the entry's name.
      numbers: numbers of the thread blocks in the grid, x fastest, shape (blocks,).
      lanes: number of lanes, blocks * padded. Lane i is thread i % padded of thread block i //
        padded.
      cluster: extents of a cluster. Its `cluster_size` thread blocks are adjacent in the batch, by
        rank.
      exists: whether a lane is a thread, not padding, shape (lanes,).
    """

    def __init__(
        self,
        kernel: str,
        grid: Extent,
        block: Extent,
        numbers: np.ndarray,
        cluster: Extent = (1, 1, 1),
    ) -> None:
        self.kernel, self.grid, self.block, self.cluster = kernel, grid, block, cluster
        self.cluster_size = cluster[0] * cluster[1] * cluster[2]
        self.numbers, self.blocks = numbers, numbers.size
        self.threads = block[0] * block[1] * block[2]
        self.padded = -(-self.threads // WARP) * WARP
        self.lanes = self.blocks * self.padded
        self.lane_numbers = np.arange(self.lanes)
        self.block_of_lane = self.lane_numbers // self.padded
        self.cluster_of_lane = self.block_of_lane // self.cluster_size
        self.thread_of_lane = self.lane_numbers % self.padded
        self.exists = self.thread_of_lane < self.threads
        self._special: dict[str, np.ndarray] = {}

    def special(self, name: str) -> np.ndarray:
        """Returns a special register as u32, shape (lanes,), or (1,) if all lanes agree."""
        if name not in self._special:
            self._special[name] = np.atleast_1d(self._compute_special(name)).astype(np.uint32)
        return self._special[name]

    def _compute_special(self, name: str) -> np.ndarray | int:
        if name == "%laneid":
            return self.thread_of_lane % WARP
        if name == "%warpid":
            return self.thread_of_lane // WARP
        if name == "%nwarpid":
            return self.padded // WARP
        if name.startswith("%lanemask_"):
            return self._lane_mask(name[-2:])
        if name == "%cluster_ctarank":
            return self.block_of_lane % self.cluster_size
        if name == "%cluster_nctarank":
            return self.cluster_size
        register, _, axis_name = name.partition(".")
        axis = "xyz".index(axis_name)
        if register == "%cluster_nctaid":
            return self.cluster[axis]
        if register == "%nclusterid":
            return self.grid[axis] // self.cluster[axis]
        if register == "%cluster_ctaid":
            return self._compute_special(f"%ctaid.{axis_name}") % self.cluster[axis]
        if register == "%clusterid":
            return self._compute_special(f"%ctaid.{axis_name}") // self.cluster[axis]
        if register in ("%ntid", "%nctaid"):
            return (self.block if register == "%ntid" else self.grid)[axis]
        extents = self.block if register == "%tid" else self.grid
        if extents[axis] == 1:
            return 0
        linear = self.thread_of_lane if register == "%tid" else self.numbers[self.block_of_lane]
        if register == "%ctaid" and self.blocks == 1:
            linear = linear[:1]
        below = 1
        for extent in extents[:axis]:
            below *= extent
        return linear // below % extents[axis]

    def _lane_mask(self, relation: str) -> np.ndarray:
        """Returns %lanemask_lt, le, eq, ge or gt of each lane, shape (lanes,), u64."""
        lane = (self.thread_of_lane % WARP).astype(np.uint64)
        own = np.uint64(1) << lane
        lower = own - np.uint64(1)
        masks = {"lt": lower, "le": lower | own, "eq": own, "ge": ~lower, "gt": ~(lower | own)}
        return masks[relation] & np.uint64(0xFFFFFFFF)

    def block_name(self, number: int) -> str:
        return f"block {_split(number, self.grid)}"

    def fault(
        self, error: type[SimulationError], instruction: Instruction, lane: int, what: str
    ) -> SimulationError:
        """Returns an error that names the kernel, the line, the thread block and the thread."""
        block, thread = self.block_name(int(self.numbers[lane // self.padded])), lane % self.padded
        return error(
            f"kernel {self.kernel}: {what}\n  line {instruction.line}: {instruction.text}\n  "
            f"{block}, thread {_split(thread, self.block)}",
            instruction.line,
        )


def _split(linear: int, extents: Extent) -> Extent:
    """Returns the coordinates of a linear number, x fastest."""
    x, y, _ = extents
    return linear % x, linear // x % y, linear // (x * y)
