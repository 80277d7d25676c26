"""Barriers of a thread block or a cluster: tracks arrivals and releases waiting lanes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .batch import Batch
from .errors import BarrierDivergence, Deadlock, EarlyExit, SimulationError
from .layout import WARP
from .steps.compile import CLUSTER, Barrier, Block
from .text.program import Instruction

_NOT_WAITING = -1


class Barriers:
    """Lanes of a batch that wait at barriers.

    Args:
      strict: raises if a thread exited before a barrier of its full thread block.
      go: called with a basic block's number and the lanes that continue there.
    """

    def __init__(
        self,
        batch: Batch,
        blocks: list[Block],
        strict: bool,
        go: Callable[[int, np.ndarray], None],
    ) -> None:
        self.batch, self.blocks, self.strict, self.go = batch, blocks, strict, go
        #: Basic block whose barrier each lane waits at.
        self.at = np.full(batch.layout.lanes, _NOT_WAITING, np.int64)

    def is_everyone(self, block: Block, lanes: int) -> bool:
        """Returns whether `lanes` lanes are all that the barrier ending a basic block awaits."""
        layout = self.batch.layout
        return lanes == layout.lanes and block.barrier[1] in (None, layout.threads)

    def arrive(self, block: Block, number: int, lanes: np.ndarray) -> None:
        """Records the arrival of full warps at the barrier that ends a basic block."""
        batch, layout = self.batch, self.batch.layout
        warps = layout.lanes // WARP
        here = np.bincount(lanes // WARP, minlength=warps)
        alive = np.flatnonzero(layout.exists & ~batch.exited)
        live = np.bincount(alive // WARP, minlength=warps)
        partial = (here > 0) & (here != live)
        if partial.any():
            warp = int(np.argmax(partial))
            lane = int(lanes[np.argmax(lanes // WARP == warp)])
            assert block.instruction is not None
            told = (
                f"{int(here[warp])} of the warp's {int(live[warp])} live threads are at this "
                "barrier, the others elsewhere"
            )
            raise layout.fault(BarrierDivergence, block.instruction, lane, told)
        self.at[lanes] = number

    @property
    def waiting(self) -> np.ndarray:
        """Numbers of the lanes that wait."""
        return np.flatnonzero(self.at != _NOT_WAITING)

    def release(self, waiting: np.ndarray) -> bool:
        """Releases all complete barriers; returns False if there are none."""
        barriers = {int(n): self.blocks[int(n)].barrier for n in np.unique(self.at[waiting])}
        released = False
        for barrier in sorted(set(barriers.values()), key=str):
            at = [n for n, b in barriers.items() if b == barrier]
            lanes = np.flatnonzero(np.isin(self.at, at))
            owners = self._owners(barrier)
            owner, exited = owners[lanes], self._count(owners, self.batch.exited)
            live = self._count(owners, self.batch.layout.exists & ~self.batch.exited)
            arrived = np.bincount(owner, minlength=live.size)
            if self.strict and barrier[1] is None and (exited[owner] > 0).any():
                position = int(np.argmax(exited[owner] > 0))
                raise self._early_exit(int(lanes[position]), int(exited[owner[position]]))
            complete = (arrived > 0) & (arrived == (live if barrier[1] is None else barrier[1]))
            going = lanes[complete[owner]]
            for number in at:
                group = going[self.at[going] == number]
                if group.size:
                    self.go(number + 1, group)
            self.at[going] = _NOT_WAITING
            self.pass_by(barrier, going)
            released |= bool(going.size)
        return released

    def pass_by(self, barrier: Barrier, lanes: np.ndarray | None) -> None:
        """Records that lanes passed a complete barrier; `lanes` None means all lanes."""
        happens_before = self.batch.happens_before
        if barrier[0] == CLUSTER:
            happens_before.pass_cluster_barrier(lanes)
        else:
            happens_before.pass_barrier(lanes)

    def _owners(self, barrier: Barrier) -> np.ndarray:
        """Returns, per lane, the index of the thread block or cluster that meets at the barrier."""
        layout = self.batch.layout
        return layout.cluster_of_lane if barrier[0] == CLUSTER else layout.block_of_lane

    def _count(self, owners: np.ndarray, where: np.ndarray) -> np.ndarray:
        """Returns the number of lanes with `where` true per owner (thread block or cluster)."""
        return np.bincount(owners[where], minlength=int(owners[-1]) + 1)

    def _early_exit(self, lane: int, exited: int) -> SimulationError:
        whose = "cluster" if self._barrier(lane)[0] == CLUSTER else "block"
        told = f"waits at a barrier, but {exited} threads of its {whose} exited before it"
        return self.batch.layout.fault(EarlyExit, self._instruction(lane), lane, told)

    def stuck(self, lane: int) -> SimulationError:
        layout, owners = self.batch.layout, self._owners(self._barrier(lane))
        whose, together = "block", layout.threads
        if self._barrier(lane)[0] == CLUSTER:
            whose, together = "cluster", layout.threads * layout.cluster_size
        count = int(((owners == owners[lane]) & (self.at != _NOT_WAITING)).sum())
        told = f"{count} of the {whose}'s {together} threads wait at barriers that never complete"
        return layout.fault(Deadlock, self._instruction(lane), lane, told)

    def _barrier(self, lane: int) -> Barrier:
        return self.blocks[int(self.at[lane])].barrier

    def _instruction(self, lane: int) -> Instruction:
        instruction = self.blocks[int(self.at[lane])].instruction
        assert instruction is not None
        return instruction
