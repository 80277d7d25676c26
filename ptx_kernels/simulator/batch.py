"""State of the blocks that are simulated together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .errors import SimulationError
from .frame import WARP
from .memory.global_memory import GlobalMemory
from .memory.local_memory import LocalMemory
from .memory.shared_memory import SharedMemory
from .races.happens_before import Order
from .text.program import SHARED_BASE, Instruction

if TYPE_CHECKING:
    from .hopper.bulk_store import BulkStores
    from .perturbation import Perturbation
    from .steps.compile import Compiled
    from .traffic import Traffic

Extent = tuple[int, int, int]


class Batch:
    """Some blocks of the grid; lanes are padded to whole warps per block.

    Attributes:
      numbers: of the blocks in the grid, x fastest, shape (blocks,).
      lanes: number of lanes, blocks * padded threads; lane i is thread i % padded of block i //
        padded.
      exists: whether a lane is a thread (padding is not), shape (lanes,).
      exited: threads that have returned, shape (lanes,).
      order: what the lanes' accesses are in order with.
      perturbation: draws what hardware leaves open, or None; salt: of approximate results.
      traffic: counts accesses, or None.
    """

    def __init__(
        self,
        program: Compiled,
        memory: GlobalMemory,
        parameters: list[np.ndarray],
        grid: Extent,
        block: Extent,
        numbers: np.ndarray,
        shared_bytes: int,
        perturbation: Perturbation | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self.program = program
        self.memory, self.parameters = memory, parameters
        self.grid, self.block = grid, block
        self.numbers, self.blocks = numbers, numbers.size
        self.threads = block[0] * block[1] * block[2]
        self.padded = -(-self.threads // WARP) * WARP
        self.lanes = self.blocks * self.padded
        self.lane_numbers = np.arange(self.lanes)
        self.block_of_lane = self.lane_numbers // self.padded
        self.thread_of_lane = self.lane_numbers % self.padded
        self.exists = self.thread_of_lane < self.threads
        self.exited = np.zeros(self.lanes, np.bool_)
        self.order = Order(memory, numbers, self.padded)
        self.shared = SharedMemory(self.blocks, shared_bytes, synchronizes=program.synchronizes)
        self.bulk_stores: BulkStores | None = None  # there once the kernel issues one
        self.local = LocalMemory(self.lanes, program.program.local_bytes)
        self.initial_registers: list[np.ndarray | None] = [None] * len(program.registers) + list(
            program.constants
        )
        self.perturbation = None if perturbation is None else perturbation.generator
        self.salt = None if perturbation is None else perturbation.salt
        self.traffic = traffic
        self._special: dict[str, np.ndarray] = {}

    def special(self, name: str) -> np.ndarray:
        """A special register as u32, per lane or one value, shape (lanes,) or (1,)."""
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
            lane = (self.thread_of_lane % WARP).astype(np.uint64)
            own = np.uint64(1) << lane
            lower = own - np.uint64(1)
            masks = {"lt": lower, "le": lower | own, "eq": own, "ge": ~lower, "gt": ~(lower | own)}
            return masks[name[-2:]] & np.uint64(0xFFFFFFFF)
        register, _, axis_name = name.partition(".")
        axis = "xyz".index(axis_name)
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

    def scatter(self, target: np.ndarray, index: np.ndarray, items: np.ndarray) -> None:
        """target[index] = items; where lanes collide the highest lane wins, or any if perturbed."""
        if self.perturbation is not None:
            order = self.perturbation.permutation(max(index.size, items.size))
            index, items = (x if x.size == 1 else x[order] for x in (index, items))
        target[index] = items if items.size <= index.size else items[-1:]  # all lanes at one place

    def turns(self, count: int) -> np.ndarray:
        """In which order so many lanes are served one after the other: the lowest first, or any if
        perturbed.
        """
        return (
            np.arange(count) if self.perturbation is None else self.perturbation.permutation(count)
        )

    def block_name(self, number: int) -> str:
        return f"block {_split(number, self.grid)}"

    def fault(
        self, error: type[SimulationError], instruction: Instruction, lane: int, what: str
    ) -> SimulationError:
        block, thread = self.block_name(int(self.numbers[lane // self.padded])), lane % self.padded
        return error(
            f"kernel {self.program.name}: {what}\n  line {instruction.line}: {instruction.text}\n  "
            f"{block}, thread {_split(thread, self.block)}",
            instruction.line,
        )


def _split(linear: int, extents: Extent) -> Extent:
    """Coordinates of a linear number, x fastest."""
    x, y, _ = extents
    return linear % x, linear // x % y, linear // (x * y)


def shared_name(symbols: dict[str, int], offset: int) -> str:
    """`name + bytes` of a shared offset."""
    below = [(at, name) for name, at in symbols.items() if at - SHARED_BASE <= offset]
    if not below:
        return f"shared offset {offset}"
    at, name = max(below)
    return f"shared {name}+{offset - (at - SHARED_BASE)}"
