"""Barriers of a block: who has arrived, and who may go on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .batch import Batch
from .errors import BarrierDivergence, Deadlock, EarlyExit, SimulationError
from .layout import WARP
from .steps.compile import Block
from .text.program import Instruction

_NOT_WAITING = -1


class Barriers:
    """Lanes at barriers.

    `strict`: a thread that exited before a barrier of its whole block is an error. `go`: where
    lanes continue.
    """

    def __init__(
        self,
        batch: Batch,
        blocks: list[Block],
        strict: bool,
        go: Callable[[int, np.ndarray], None],
    ) -> None:
        self.batch, self.blocks, self.strict, self.go = batch, blocks, strict, go
        #: number of the block whose barrier a lane waits at
        self.at = np.full(batch.layout.lanes, _NOT_WAITING, np.int64)

    def is_everyone(self, block: Block, lanes: int) -> bool:
        """True if so many lanes are all that the barrier waits for."""
        layout = self.batch.layout
        return lanes == layout.lanes and block.barrier[1] in (None, layout.threads)

    def arrive(self, block: Block, number: int, lanes: np.ndarray) -> None:
        """Whole warps arrive at the barrier that ends a block."""
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
        """Lanes that wait."""
        return np.flatnonzero(self.at != _NOT_WAITING)

    def release(self, waiting: np.ndarray) -> bool:
        """Lets the blocks go whose barrier is complete; False if there is none."""
        batch, layout = self.batch, self.batch.layout
        alive = layout.block_of_lane[layout.exists & ~batch.exited]
        live = np.bincount(alive, minlength=layout.blocks)
        exited = np.bincount(layout.block_of_lane[batch.exited], minlength=layout.blocks)
        barriers = {int(n): self.blocks[int(n)].barrier for n in np.unique(self.at[waiting])}
        released = False
        for barrier in sorted(set(barriers.values()), key=str):
            at = [n for n, b in barriers.items() if b == barrier]
            lanes = np.flatnonzero(np.isin(self.at, at))
            owner = layout.block_of_lane[lanes]
            arrived = np.bincount(owner, minlength=layout.blocks)
            if self.strict and barrier[1] is None and (exited[owner] > 0).any():
                raise self._early_exit(int(lanes[np.argmax(exited[owner] > 0)]), exited)
            complete = (arrived > 0) & (arrived == (live if barrier[1] is None else barrier[1]))
            going = lanes[complete[owner]]
            for number in at:
                group = going[self.at[going] == number]
                if group.size:
                    self.go(number + 1, group)
            self.at[going] = _NOT_WAITING
            batch.happens_before.pass_barrier(going)
            released |= bool(going.size)
        return released

    def _early_exit(self, lane: int, exited: np.ndarray) -> SimulationError:
        layout = self.batch.layout
        told = (
            f"waits at a barrier, but {int(exited[layout.block_of_lane[lane]])} threads of its "
            "block exited before it"
        )
        return layout.fault(EarlyExit, self._instruction(lane), lane, told)

    def stuck(self, lane: int) -> SimulationError:
        layout = self.batch.layout
        of_block = layout.block_of_lane == layout.block_of_lane[lane]
        count = int((of_block & (self.at != _NOT_WAITING)).sum())
        told = (
            f"{count} of the block's {layout.threads} threads wait at barriers that never complete"
        )
        return layout.fault(Deadlock, self._instruction(lane), lane, told)

    def _instruction(self, lane: int) -> Instruction:
        instruction = self.blocks[int(self.at[lane])].instruction
        assert instruction is not None
        return instruction
