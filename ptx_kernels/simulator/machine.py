"""Scheduler: runs groups of lanes, the lowest program counter first, until all threads exit.

All lanes of a batch start together. A divergent branch splits them. The group with the lowest
program counter runs next and merges with lanes that wait where it arrives, so structured control
flow reconverges at the end of each `if` and loop. Groups keep their registers as long as they stay
together.
"""

from __future__ import annotations

import numpy as np

from .barriers import Barriers
from .batch import Batch
from .errors import StepLimit
from .frame import Frame
from .layout import WARP
from .parking import Parking, gather
from .steps.compile import Block


class Machine:
    """Runs one batch of thread blocks through a program's basic blocks.

    Args:
      strict: raises if a thread exited before a barrier of its full thread block.
    """

    def __init__(self, blocks: list[Block], batch: Batch, strict: bool, step_limit: int) -> None:
        self.blocks, self.batch = blocks, batch
        self.steps_left = step_limit
        self.lane_instructions = 0
        self.ready: dict[int, list[np.ndarray]] = {}  # basic block number -> lanes
        self.parking = Parking(batch, blocks, self._go)
        self.barriers = Barriers(batch, blocks, strict, self._go)

    def run(self) -> None:
        self._go(0, np.flatnonzero(self.batch.layout.exists))
        while self.ready or self._release():
            for turn in self._turns():
                self.ready = turn
                while self.ready:
                    number = min(self.ready)
                    self._run_group(number, gather(self.batch, self.ready.pop(number)))
        for end in self.batch.at_end:
            end()

    def _go(self, number: int, lanes: np.ndarray) -> None:
        """Makes these lanes ready to run at basic block `number`."""
        self.ready.setdefault(number, []).append(lanes)

    def _turns(self) -> list[dict[int, list[np.ndarray]]]:
        """Splits the ready lanes into groups that run in sequence up to the next barrier.

        Returns {basic block: lanes} of each group. All lanes are one group, or random warps are
        groups if perturbed.
        """
        generator = self.batch.freedom.generator
        if generator is None:
            return [self.ready]
        warps = self.batch.layout.lanes // WARP
        turn = generator.integers(0, generator.integers(1, 5), warps)
        turns: list[dict[int, list[np.ndarray]]] = [{} for _ in range(int(turn.max()) + 1)]
        for number, parts in self.ready.items():
            for lanes in parts:
                mine = turn[lanes // WARP]
                for t in np.unique(mine):
                    turns[t].setdefault(number, []).append(lanes[mine == t])
        return turns

    def _run_group(self, number: int, frame: Frame) -> None:
        """Runs a group of lanes until it splits, ends, waits, or reaches another group."""
        batch, blocks = self.batch, self.blocks
        is_root = frame is batch.root
        lowest = min(self.ready, default=len(blocks))
        while number < lowest:
            block = blocks[number]
            if block.wait is not None and self.parking.park(block.wait, number, frame):
                return
            self.lane_instructions += frame.count * block.size
            self.steps_left -= 1
            if self.steps_left < 0:
                assert block.instruction is not None
                told = "the launch runs longer than its step limit"
                raise frame.fault(StepLimit, block.instruction, 0, told)
            regs = frame.regs
            for step, dead in block.steps:
                step(batch, frame)
                for register in dead:
                    regs[register] = None
            if not is_root:
                frame.dirty.update(block.writes)
            following = self._finish(block, number, frame)
            if following is None:
                return
            number = following
        frame.flush(blocks[number].live_in)
        self._go(number, frame.all_lanes)

    def _finish(self, block: Block, number: int, frame: Frame) -> int | None:
        """Ends a basic block; returns the group's next one, None if it split, ended or waits."""
        if block.end == "next":
            return number + 1
        taken: np.ndarray | None = None  # positions of the lanes whose guard holds; None for all
        if block.guard is not None:
            slot, negated = block.guard
            assert block.instruction is not None
            condition = frame.regs[slot]
            if condition is None:
                condition = frame.fetch(slot, block.instruction)
            if condition.size == 1:
                if bool(condition[0]) is negated:
                    return number + 1
            else:
                taken = np.flatnonzero(~condition if negated else condition)
                if taken.size == 0:
                    return number + 1
                if taken.size == frame.count:
                    taken = None
        if block.end == "branch":
            if taken is None:
                return block.target
            self._split(frame, taken, block.target, number + 1)
        elif block.end == "exit":
            lanes = frame.all_lanes
            self.batch.exited[lanes if taken is None else lanes[taken]] = True
            if taken is not None:
                self._split(frame, taken, None, number + 1)
        else:
            return self._arrive(block, number, frame, taken)
        return None

    def _split(self, frame: Frame, taken: np.ndarray, target: int | None, other: int) -> None:
        blocks, lanes = self.blocks, frame.all_lanes
        live = blocks[other].live_in
        if target is not None:
            live |= blocks[target].live_in
        frame.flush(live)
        rest = np.ones(frame.count, np.bool_)
        rest[taken] = False
        self._go(other, lanes[rest])
        if target is not None:
            self._go(target, lanes[taken])

    def _arrive(
        self, block: Block, number: int, frame: Frame, taken: np.ndarray | None
    ) -> int | None:
        """Ends a basic block at a barrier; returns the next one if all arrived, else None."""
        if taken is None and self.barriers.is_everyone(block, frame.count):
            self.barriers.pass_by(block.barrier, None)
            return number + 1
        arriving = frame.all_lanes if taken is None else frame.all_lanes[taken]
        self.barriers.arrive(block, number, arriving)
        if taken is not None:
            self._split(frame, taken, None, number + 1)
        else:
            frame.flush(self.blocks[number + 1].live_in)
        return None

    def _release(self) -> bool:
        """Releases waiting lanes when no lane can run; returns False if no lane waits.

        It tries lanes whose wait conditions hold first, then barriers, then waits that may fail.
        Raises if none of these helps.
        """
        parked = bool(self.parking.parked)
        if parked and self.parking.release():
            return True
        waiting = self.barriers.waiting
        if (waiting.size and self.barriers.release(waiting)) or (parked and self.parking.fail()):
            return True
        if parked:
            raise self.parking.stuck()
        if waiting.size:
            raise self.barriers.stuck(int(waiting[0]))
        return False
