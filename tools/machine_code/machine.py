"""Runs warps of some blocks: the loop over instructions, and the order of threads.

Every thread has its own counter. Threads with the lowest one go on together, so that all blocks
pass an instruction at once; or, with a random generator, some warps of any place of the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_kernels.ptx import Kernel

from .code import Code
from .control import CONTROL, release
from .copies import Copies
from .errors import DeadlockFault, Fault, UnknownInstructionFault
from .memory import LOCAL_BYTES, GlobalMemory, SharedMemory
from .operands import Constants, Operands, Reader
from .state import DONE, LANES, RUNS, Mask, State, lane_masks
from .table import compiled

STEPS = 50_000_000
_NOWHERE = 1 << 30


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
    """Runs a kernel's code for a number of whole clusters at a time.

    Args:
      reserved, shared_bytes: bytes at the beginning of a block's shared memory that belong to the
        system, and bytes after them.
      late: whether asynchronous copies write only when a thread waits for them, or at once.
      rng: makes the order of warps random.
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
        rng: np.random.Generator | None = None,
    ) -> None:
        self.code, self.shape, self.memory, self.late = code, shape, memory, late
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
        self._program: list[Any] = [None] * len(code.instructions)
        self._rng = rng
        self._steps = 0
        self.executed: set[str] = set()

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

    def run(self, clusters: np.ndarray) -> None:
        """Runs clusters of blocks: (clusters, blocks of a cluster) numbers.

        Raises:
          Fault: with the address and the text of the instruction.
        """
        self._begin(clusters)
        self.copies = Copies(self, self.late)
        with np.errstate(all="ignore"):
            self._run_all()

    def _run_all(self) -> None:
        while True:
            running = self.state.waits == RUNS
            if not running.any():
                if (self.state.waits == DONE).all():
                    self.copies.check_exit()
                    return
                if not release(self):
                    raise DeadlockFault("the remaining threads wait for each other", self._places())
                continue
            self._go_on(running)

    def _begin(self, clusters: np.ndarray) -> None:
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

    def _go_on(self, running: np.ndarray) -> None:
        """Chooses threads at one place, and runs them until others are there or they part."""
        counter = self.state.counter
        if self._rng is None:
            least = counter.min(where=running, initial=_NOWHERE)
            chosen = running & (counter == least)
            others = counter.min(where=running & ~chosen, initial=_NOWHERE)
            self._run(int(least), chosen, int(others), STEPS)
            return
        lane, warp = divmod(int(self._rng.choice(np.flatnonzero(running))), self.state.warps)
        chosen = running & (counter == counter[lane, warp])
        some = self._rng.random(self.state.warps) < self._rng.choice((0.2, 0.7, 1.0))
        some[warp] = True
        self._run(int(counter[lane, warp]), chosen & some, _NOWHERE, int(self._rng.integers(1, 60)))

    def _run(self, at: int, chosen: np.ndarray, others: int, limit: int) -> None:
        came: Mask = None if chosen.all() else chosen
        try:
            for _ in range(limit):
                self._steps += 1
                guard, step, control = self._program[at] or self._compile(at)
                mask = came
                if guard is not None:
                    mask = self._guarded(guard(), came)
                if mask is not None and not mask.any():
                    at += 1
                elif control:
                    next_ = step(mask, came, at)
                    if next_ < 0:
                        return
                    at = next_
                else:
                    step(mask)
                    at += 1
                if at >= others or self._steps > STEPS:
                    break
        except Fault as fault:
            raise fault.at(self._place(at)) from fault
        if self._steps > STEPS:
            raise DeadlockFault(f"more than {STEPS} steps", self._place(at))
        self.state.counter[chosen] = at

    @staticmethod
    def _guarded(guard: np.ndarray, came: Mask) -> Mask:
        if guard.all():
            return came
        if came is None:
            return guard if guard.shape[0] > 1 else np.broadcast_to(guard, (32, guard.shape[1]))
        return came & guard

    def _compile(self, at: int) -> tuple[Any, Any, bool]:
        instruction = self.code.instructions[at]
        control = instruction.name in CONTROL
        guard = None if instruction.guard is None else self.operands.predicate(instruction.guard)
        if control:
            step: Any = CONTROL[instruction.name](instruction, self)
        else:
            step = compiled(instruction, self)
        self.executed.add(".".join((instruction.name, *instruction.modifiers)))
        self._program[at] = guard, step, control
        return guard, step, control

    def _place(self, at: int) -> str:
        instruction = self.code.instructions[at]
        return f"{instruction.address:#06x}: {instruction.text}"

    def _places(self) -> str:
        left = self.state.counter[self.state.waits != DONE]
        return "; ".join(self._place(max(0, at - 1)) for at in np.unique(left)[:4].tolist())


def _names(code: Code) -> set[str]:
    return {instruction.name for instruction in code.instructions}
