"""The scheduler: groups of lanes at program counters, the lowest first, until every thread has
exited.

All lanes of a batch start together. A branch on which they disagree splits them; the group with the
lowest program counter runs next and takes in whoever waits where it arrives, so that structured
control flow reconverges at the end of each `if` and loop. Groups keep their registers as long as
they stay together.
"""

from __future__ import annotations

import numpy as np

from .batch import Batch
from .errors import BarrierDivergence, Deadlock, EarlyExit, StepLimit
from .frame import WARP, Frame
from .hopper.bulk_copy import complete
from .hopper.mbarrier import Wait, mbarriers, name
from .steps.compile import Block, Compiled
from .text.program import Instruction

_NOT_WAITING = -1


class Machine:
    """Runs one batch. `strict`: a thread that exited before a barrier of its whole block is an
    error.
    """

    def __init__(self, program: Compiled, batch: Batch, strict: bool, step_limit: int) -> None:
        self.program, self.batch, self.strict = program, batch, strict
        self.steps_left = step_limit
        self.lane_instructions = 0
        self.root = Frame(batch, None, None, batch.lanes)
        self.ready: dict[int, list[np.ndarray]] = {}  # block number -> lanes
        self.parked: dict[
            int, list[np.ndarray]
        ] = {}  # block number -> lanes that wait for an mbarrier
        self.waiting = np.full(
            batch.lanes, _NOT_WAITING, np.int64
        )  # the barrier block a lane waits in

    def run(self) -> None:
        self.ready[0] = [np.flatnonzero(self.batch.exists)]
        while self.ready or self._release():
            for turn in self._turns():
                self.ready = turn
                while self.ready:
                    number = min(self.ready)
                    self._run_group(number, self._gather(self.ready.pop(number)))
        if self.batch.bulk_stores is not None:
            self.batch.bulk_stores.finish(self.batch)

    def _turns(self) -> list[dict[int, list[np.ndarray]]]:
        """Who runs before whom up to the next barrier: all together, or random groups of warps if
        perturbed.
        """
        generator = self.batch.perturbation
        if generator is None:
            return [self.ready]
        turn = generator.integers(0, generator.integers(1, 5), self.batch.lanes // WARP)
        turns: list[dict[int, list[np.ndarray]]] = [{} for _ in range(int(turn.max()) + 1)]
        for number, parts in self.ready.items():
            for lanes in parts:
                mine = turn[lanes // WARP]
                for t in np.unique(mine):
                    turns[t].setdefault(number, []).append(lanes[mine == t])
        return turns

    def _gather(self, parts: list[np.ndarray]) -> Frame:
        lanes = parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))
        return self.root if lanes.size == self.batch.lanes else self.root.subset(lanes)

    def _suspend(self, frame: Frame, number: int, lanes: np.ndarray) -> None:
        frame.flush(self.program.blocks[number].live_in)
        self.ready.setdefault(number, []).append(lanes)

    def _run_group(self, number: int, frame: Frame) -> None:
        """Runs a group until it splits, ends, waits, or others have a lower or the same program
        counter.
        """
        blocks, is_root = self.program.blocks, frame is self.root
        lowest = min(self.ready, default=len(blocks))
        while number < lowest:
            block = blocks[number]
            if block.wait is not None and self._park(block.wait, number, frame):
                return
            self.lane_instructions += frame.count * block.size
            self.steps_left -= 1
            if self.steps_left < 0:
                assert block.instruction is not None
                raise frame.fault(
                    StepLimit, block.instruction, 0, "the launch runs longer than its step limit"
                )
            regs = frame.regs
            for step, dead in block.steps:
                step(frame)
                for register in dead:
                    regs[register] = None
            if not is_root:
                frame.dirty.update(block.writes)
            following = self._finish(block, number, frame)
            if following is None:
                return
            number = following
        self._suspend(frame, number, frame.all_lanes)

    def _finish(self, block: Block, number: int, frame: Frame) -> int | None:
        """The block that the whole group goes on to, or None if it split, ended or waits."""
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
        blocks, lanes = self.program.blocks, frame.all_lanes
        live = blocks[other].live_in | (
            blocks[target].live_in if target is not None else frozenset()
        )
        frame.flush(live)
        rest = np.ones(frame.count, np.bool_)
        rest[taken] = False
        self.ready.setdefault(other, []).append(lanes[rest])
        if target is not None:
            self.ready.setdefault(target, []).append(lanes[taken])

    # --- mbarriers
    # --------------------------------------------------------------------------------------------------

    def _park(self, wait: Wait, number: int, frame: Frame) -> bool:
        """Sets the lanes aside whose mbarrier's phase is not complete; False if there are none."""
        passes = wait.passes(frame)
        if passes.all():
            return False
        frame.flush(self.program.blocks[number].live_in)
        lanes = frame.all_lanes
        self.parked.setdefault(number, []).append(lanes[~passes])
        if passes.any():
            self.ready.setdefault(number, []).append(lanes[passes])
        return True

    def _unpark(self) -> bool:
        """Lets those go whose phase is complete, by copies that now arrive if need be. False if nobody can go."""
        if self._let_go():
            return True
        frames = [
            (self._wait(number), self._gather(parts)) for number, parts in self.parked.items()
        ]
        complete(
            self.root, {int(at) for wait, frame in frames for at in np.unique(wait.places(frame))}
        )
        return self._let_go()

    def _fail(self) -> bool:
        """Lets go who tests for a phase and may find it incomplete."""
        for number, parts in self.parked.items():
            if self._wait(number).can_fail:
                frame = self._gather(parts)
                mbarriers(frame).impatient[frame.all_lanes] = True
        return self._let_go()

    def _let_go(self) -> bool:
        for number, parts in list(self.parked.items()):
            frame = self._gather(parts)
            passes, lanes = self._wait(number).passes(frame), frame.all_lanes
            if passes.any():
                self.ready.setdefault(number, []).append(lanes[passes])
            self.parked[number] = [lanes[~passes]]
        self.parked = {number: parts for number, parts in self.parked.items() if parts[0].size}
        return bool(self.ready)

    def _wait(self, number: int) -> Wait:
        wait = self.program.blocks[number].wait
        assert wait is not None
        return wait

    def _stuck(self) -> Deadlock:
        number, (lanes, *_) = min(self.parked.items())
        frame = self._gather([lanes])
        what = f"waits for a phase of {name(frame, int(self._wait(number).places(frame)[0]))} that nobody completes"
        error = self.batch.fault(Deadlock, self._wait(number).instruction, int(lanes[0]), what)
        assert isinstance(error, Deadlock)
        return error

    # --- barriers ---------------------------------------------------------------------------------------------------

    def _arrive(
        self, block: Block, number: int, frame: Frame, taken: np.ndarray | None
    ) -> int | None:
        batch = self.batch
        if frame is self.root and taken is None and block.barrier[1] in (None, batch.threads):
            batch.order.pass_barrier(None)  # everyone is here
            return number + 1
        arriving = frame.all_lanes if taken is None else frame.all_lanes[taken]
        warps = batch.lanes // WARP
        here = np.bincount(arriving // WARP, minlength=warps)
        live = np.bincount(np.flatnonzero(batch.exists & ~batch.exited) // WARP, minlength=warps)
        partial = (here > 0) & (here != live)
        if partial.any():
            warp = int(np.argmax(partial))
            lane = int(arriving[np.argmax(arriving // WARP == warp)])
            assert block.instruction is not None
            raise batch.fault(
                BarrierDivergence,
                block.instruction,
                lane,
                f"{int(here[warp])} of the warp's "
                f"{int(live[warp])} live threads are at this barrier, the others elsewhere",
            )
        if taken is not None:
            self._split(frame, taken, None, number + 1)
        else:
            frame.flush(self.program.blocks[number + 1].live_in)
        self.waiting[arriving] = number
        return None

    def _release(self) -> bool:
        """With nobody left to run: lets go who waits for what is complete. False if nobody waits.

        In this order: mbarriers, barriers, tests of mbarriers that fail.
        """
        if self.parked and self._unpark():
            return True
        waiting = np.flatnonzero(self.waiting != _NOT_WAITING)
        if (waiting.size and self._release_barriers(waiting)) or (self.parked and self._fail()):
            return True
        if self.parked:
            raise self._stuck()
        if waiting.size:
            batch, lane = self.batch, int(waiting[0])
            of_block = batch.block_of_lane == batch.block_of_lane[lane]
            count = int((of_block & (self.waiting != _NOT_WAITING)).sum())
            raise batch.fault(
                Deadlock,
                self._instruction(lane),
                lane,
                f"{count} of the block's {batch.threads} threads wait at barriers that never complete",
            )
        return False

    def _release_barriers(self, waiting: np.ndarray) -> bool:
        """Lets the blocks go whose barrier is complete; `waiting`: the lanes at barriers. False if there is none."""
        batch, blocks = self.batch, self.program.blocks
        live = np.bincount(
            batch.block_of_lane[batch.exists & ~batch.exited], minlength=batch.blocks
        )
        exited = np.bincount(batch.block_of_lane[batch.exited], minlength=batch.blocks)
        barriers = {int(n): blocks[int(n)].barrier for n in np.unique(self.waiting[waiting])}
        released = False
        for barrier in sorted(set(barriers.values()), key=str):
            at = [n for n, b in barriers.items() if b == barrier]
            lanes = np.flatnonzero(np.isin(self.waiting, at))
            owner = batch.block_of_lane[lanes]
            arrived = np.bincount(owner, minlength=batch.blocks)
            if self.strict and barrier[1] is None and (exited[owner] > 0).any():
                lane = int(lanes[np.argmax(exited[owner] > 0)])
                raise batch.fault(
                    EarlyExit,
                    self._instruction(lane),
                    lane,
                    f"waits at a barrier, but {int(exited[batch.block_of_lane[lane]])} threads of its "
                    "block exited before it",
                )
            complete = (arrived > 0) & (arrived == (live if barrier[1] is None else barrier[1]))
            go = lanes[complete[owner]]
            for number in at:
                group = go[self.waiting[go] == number]
                if group.size:
                    self.ready.setdefault(number + 1, []).append(group)
            self.waiting[go] = _NOT_WAITING
            batch.order.pass_barrier(go)
            released |= bool(go.size)
        return released

    def _instruction(self, lane: int) -> Instruction:
        instruction = self.program.blocks[int(self.waiting[lane])].instruction
        assert instruction is not None
        return instruction
