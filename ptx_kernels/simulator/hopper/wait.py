"""`mbarrier.test_wait` and `mbarrier.try_wait`: lanes are parked until their phase is complete."""

from __future__ import annotations

import numpy as np

from ...ptx.instructions import Version
from ...ptx.types import TYPES
from ..access import Access
from ..batch import Batch
from ..errors import UnknownInstruction
from ..frame import Frame
from ..races.vector_clock import NOTHING
from ..steps.loads_stores import address_of
from ..steps.operands import Operands
from ..steps.registry import compiles
from ..steps.step import Step
from ..text.program import Instruction
from .mbarrier import OBJECT, WIDTH, Mbarriers, kind_of, semantics_of

_U32, _U64 = TYPES["u32"], TYPES["u64"]

_NEEDS: dict[tuple[str, ...], Version] = {
    ("test_wait",): ((7, 0), 80),
    ("test_wait", "parity"): ((7, 1), 80),
    ("try_wait",): ((7, 8), 90),
    ("try_wait", "parity"): ((7, 8), 90),
}


@compiles("mbarrier.test_wait", "mbarrier.try_wait")
def compile_wait(operands: Operands, instruction: Instruction) -> Step:
    kind = kind_of(instruction.opcode)
    if kind not in _NEEDS or not instruction.opcode.endswith(".b64"):
        raise operands.error(
            UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction"
        )
    operands.needs(instruction, _NEEDS[kind])
    return PhaseWait(operands, instruction).step


class PhaseWait:
    """The phase that lanes wait for before they execute the instruction."""

    def __init__(self, operands: Operands, instruction: Instruction) -> None:
        kind = kind_of(instruction.opcode)
        operands.count(instruction, *((3, 4) if kind[0] == "try_wait" else (3,)))
        self.instruction = instruction
        self._base, self._offset = address_of(
            operands, instruction, instruction.operands[1], "shared"
        )
        self._parity = "parity" in kind
        self._tries = kind[0] == "try_wait"
        self._semantics = semantics_of(instruction.opcode)
        self._phase, _ = operands.source(
            instruction.operands[2], _U32 if self._parity else _U64, instruction
        )
        self._target, _ = operands.destination(instruction.operands[0], TYPES["pred"], instruction)
        reads = (*operands.register_read(self._base), *operands.register_read(self._phase))
        self.can_fail = not self._tries
        self.step = Step(self._run, reads, (self._target,), synchronizes=True, wait=self)

    def _places(self, batch: Batch, frame: Frame) -> np.ndarray:
        addresses = frame.fetch(self._base, self.instruction)
        places = batch.state(Mbarriers).places(frame, addresses, self._offset)
        return np.broadcast_to(places, frame.count)

    def awaited(self, batch: Batch, frame: Frame) -> list[int]:
        return self._places(batch, frame).tolist()

    def describe(self, batch: Batch, frame: Frame) -> str:
        at = int(self._places(batch, frame)[0])
        return f"a phase of {batch.state(Mbarriers).name(at)}"

    def _complete(self, batch: Batch, frame: Frame) -> np.ndarray:
        """Whether each lane's phase is complete, or there is no object: executing that fails."""
        objects = batch.state(Mbarriers).objects
        given = np.broadcast_to(frame.fetch(self._phase, self.instruction), frame.count)
        done = np.ones(frame.count, np.bool_)
        for at in np.unique(where := self._places(batch, frame)):
            if barrier := objects.get(int(at)):
                current = barrier.phase & 1 if self._parity else barrier.phase
                done[where == at] = (
                    given[where == at] & 1 if self._parity else given[where == at]
                ) != current
        return done

    def passes(self, batch: Batch, frame: Frame) -> np.ndarray:
        """Which lanes need not be parked, shape (lanes of the frame,)."""
        done = self._complete(batch, frame)
        if self.instruction.guard is not None:
            register, negated = self.instruction.guard
            # lanes whose guard fails do not execute it
            done |= frame.fetch(register.index, self.instruction) == negated
        return done if self._tries else done | batch.state(Mbarriers).impatient[frame.all_lanes]

    def give_up(self, batch: Batch, lanes: np.ndarray) -> None:
        batch.state(Mbarriers).impatient[lanes] = True

    def _run(self, batch: Batch, frame: Frame) -> None:
        known, lanes = batch.state(Mbarriers), frame.all_lanes
        addresses = np.broadcast_to(frame.fetch(self._base, self.instruction), frame.count)
        access = Access(frame, self.instruction, addresses, self._offset, WIDTH)
        batch.shared.update(access, OBJECT)
        done = self._complete(batch, frame)
        for position, at in enumerate(self._places(batch, frame)):
            barrier = known.find(frame, self.instruction, position, int(at))
            if done[position]:
                batch.order.observe(
                    int(lanes[position]), NOTHING, barrier.completed, self._semantics
                )
        known.impatient[lanes] = False
        frame.regs[self._target] = done
