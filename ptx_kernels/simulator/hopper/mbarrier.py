"""`mbarrier`: barriers in shared memory that count arrivals of threads and bytes of copies. PTX ISA
9.1, 9.7.13.15.

A phase is complete when all expected arrivals and bytes are there; then the next one starts. Who
waits for a phase is parked by the machine until then. An arrival releases what the thread has seen,
a wait that succeeds acquires what was released up to the phase's completion: threads that did not
arrive are in no order with those that wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...ptx.instructions import Version
from ...ptx.types import TYPES
from ..errors import MbarrierMisuse, UnknownInstruction
from ..frame import Frame
from ..races.vector_clock import NOTHING, Clock, Semantics, Strong, unchanged
from ..steps.loads_stores import address_of
from ..steps.operands import Operands, Step
from ..text.program import SHARED_BASE, Instruction, Name, Operand

_MODIFIERS = {"release", "acquire", "relaxed", "cta", "cluster", "shared", "shared::cta", "b64"}
_WIDTH = 8  # bytes of an object
_LARGEST = (1 << 20) - 1  # count of arrivals, and of bytes under way
_U32, _U64 = TYPES["u32"], TYPES["u64"]


@dataclass
class Mbarrier:
    """An object's state; `released`: by all arrivals so far, `completed`: by those before the last
    phase's end.
    """

    expected: int
    pending: int
    transactions: int = 0  # bytes expected and not there yet
    phase: int = 0
    released: Clock = NOTHING
    completed: Clock = NOTHING


class Mbarriers:
    """The objects in a batch's shared memory, by their offset in it divided by 8."""

    def __init__(self, lanes: int) -> None:
        self.objects: dict[int, Mbarrier] = {}
        self.impatient = np.zeros(
            lanes, np.bool_
        )  # lanes whose test_wait is to fail: nobody else can go on

    def find(self, frame: Frame, instruction: Instruction, position: int, at: int) -> Mbarrier:
        found = self.objects.get(at)
        if found is None:
            raise frame.fault(
                MbarrierMisuse,
                instruction,
                position,
                f"{name(frame, at)}: no mbarrier.init made this",
            )
        return found

    def change(
        self,
        frame: Frame,
        instruction: Instruction,
        position: int,
        at: int,
        *,
        arrivals: int = 0,
        expect: int = 0,
        arrived: int = 0,
        released: Clock = NOTHING,
    ) -> int:
        """Expects bytes, counts arrivals and bytes that have arrived, with what they release; the
        phase before that.
        """
        barrier = self.find(frame, instruction, position, at)
        before = barrier.phase
        barrier.released = barrier.released.join(released)
        barrier.transactions += expect - arrived
        barrier.pending -= arrivals
        if barrier.pending < 0 or not abs(barrier.transactions) <= _LARGEST:
            what = (
                f"{arrivals} arrivals, of which phase {before} expects {barrier.pending + arrivals} more"
                if barrier.pending < 0
                else f"{barrier.transactions} bytes are to come, and {_LARGEST} can be counted"
            )
            raise frame.fault(MbarrierMisuse, instruction, position, f"{name(frame, at)}: {what}")
        if barrier.pending == 0 and barrier.transactions == 0:
            barrier.phase, barrier.pending = before + 1, barrier.expected
            barrier.completed = barrier.released
        return before


def mbarriers(frame: Frame) -> Mbarriers:
    shared = frame.batch.shared
    if shared.mbarriers is None:
        shared.mbarriers = Mbarriers(frame.batch.lanes)
    return shared.mbarriers


def name(frame: Frame, at: int) -> str:
    return frame.batch.program.shared_name(at * _WIDTH % frame.batch.shared.stride)


def places(frame: Frame, addresses: np.ndarray, offset: int) -> np.ndarray:
    """Where the objects at these shared addresses lie, as `Mbarriers` counts, shape (lanes of the
    frame,).
    """
    starts = frame.of_lanes(frame.batch.block_of_lane) * frame.batch.shared.stride
    return (addresses.astype(np.int64) + (offset - SHARED_BASE) + starts) // _WIDTH


class Wait:
    """Whether lanes may pass a test_wait or try_wait; the machine asks before they execute it."""

    def __init__(self, operands: Operands, instruction: Instruction) -> None:
        kind = _kind(instruction.opcode)
        operands.count(instruction, *((3, 4) if kind[0] == "try_wait" else (3,)))
        self.instruction = instruction
        self._base, self._offset = address_of(
            operands, instruction, instruction.operands[1], "shared"
        )
        self._parity = "parity" in kind
        self._tries = kind[0] == "try_wait"
        self._semantics = _semantics(instruction.opcode)
        self._phase, _ = operands.source(
            instruction.operands[2], _U32 if self._parity else _U64, instruction
        )
        self._target, _ = operands.destination(instruction.operands[0], TYPES["pred"], instruction)
        reads = (*operands.register_read(self._base), *operands.register_read(self._phase))
        self.step = Step(self._run, reads, (self._target,))

    def places(self, frame: Frame) -> np.ndarray:
        return np.broadcast_to(
            places(frame, frame.fetch(self._base, self.instruction), self._offset), frame.count
        )

    def _complete(self, frame: Frame) -> np.ndarray:
        """Whether each lane's phase is complete, or there is no object, which executing the
        instruction reports.
        """
        objects = mbarriers(frame).objects
        given = np.broadcast_to(frame.fetch(self._phase, self.instruction), frame.count)
        done = np.ones(frame.count, np.bool_)
        for at in np.unique(where := self.places(frame)):
            if barrier := objects.get(int(at)):
                current = barrier.phase & 1 if self._parity else barrier.phase
                done[where == at] = (
                    given[where == at] & 1 if self._parity else given[where == at]
                ) != current
        return done

    def passes(self, frame: Frame) -> np.ndarray:
        """Which lanes need not be parked, shape (lanes of the frame,)."""
        done = self._complete(frame)
        if self.instruction.guard is not None:
            register, negated = self.instruction.guard
            done |= (
                frame.fetch(register.index, self.instruction) == negated
            )  # these do not execute it
        return done if self._tries else done | mbarriers(frame).impatient[frame.all_lanes]

    @property
    def can_fail(self) -> bool:
        return not self._tries

    def _run(self, frame: Frame) -> None:
        known, batch, lanes = mbarriers(frame), frame.batch, frame.all_lanes
        addresses = np.broadcast_to(frame.fetch(self._base, self.instruction), frame.count)
        batch.shared.update(frame, self.instruction, addresses, self._offset, _WIDTH, _OBJECT)
        done = self._complete(frame)
        for position, at in enumerate(self.places(frame)):
            barrier = known.find(frame, self.instruction, position, int(at))
            if done[position]:
                batch.order.observe(
                    int(lanes[position]), NOTHING, barrier.completed, self._semantics
                )
        known.impatient[lanes] = False
        frame.regs[self._target] = done


#: an access to an object, which is no place of its own: releases and acquires go by phases
_OBJECT = Strong(unchanged, returns=False)


def _semantics(opcode: str) -> Semantics:
    """Arrivals release and waits acquire unless they are relaxed; other blocks reach no object."""
    ordered = "relaxed" not in opcode.split(".")
    return Semantics(acquire=ordered, release=ordered, wide=False)


def waits(instruction: Instruction) -> bool:
    return instruction.opcode.startswith(("mbarrier.test_wait.", "mbarrier.try_wait."))


def _kind(opcode: str) -> tuple[str, ...]:
    return tuple(part for part in opcode.split(".")[1:] if part not in _MODIFIERS)


_NEEDS: dict[tuple[str, ...], Version] = {
    ("init",): ((7, 0), 80),
    ("inval",): ((7, 0), 80),
    ("arrive",): ((7, 0), 80),
    ("test_wait",): ((7, 0), 80),
    ("test_wait", "parity"): ((7, 1), 80),
    ("try_wait",): ((7, 8), 90),
    ("try_wait", "parity"): ((7, 8), 90),
    ("expect_tx",): ((8, 0), 90),
    ("arrive", "expect_tx"): ((8, 0), 90),
}

_NEEDS_SINK: Version = ((7, 1), 80)  # `_` in the place of an arrival's state
_NEEDS_COUNT: Version = ((7, 8), 90)  # of arrivals


def compile_mbarrier(operands: Operands, instruction: Instruction) -> Step:
    kind = _kind(instruction.opcode)
    if kind not in _NEEDS or not instruction.opcode.endswith(".b64"):
        raise operands.error(
            UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction"
        )
    operands.needs(instruction, _NEEDS[kind])
    if waits(instruction):
        return Wait(operands, instruction).step
    given = list(instruction.operands)
    operands.count(instruction, *(count + (kind[0] == "arrive") for count in _counts(kind)))
    target = given.pop(0) if kind[0] == "arrive" else None
    if isinstance(target, Name):
        operands.needs(instruction, _NEEDS_SINK)
    if kind == ("arrive",) and len(given) > 1:
        operands.needs(instruction, _NEEDS_COUNT)
    base, offset = address_of(operands, instruction, given[0], "shared")
    number = operands.source(given[1], _U32, instruction)[0] if len(given) > 1 else None
    slot = None if target is None else _sink(operands, instruction, target)
    semantics = _semantics(instruction.opcode)

    def run(frame: Frame) -> None:
        addresses = np.broadcast_to(frame.fetch(base, instruction), frame.count)
        numbers = np.ones(1, np.uint32) if number is None else frame.fetch(number, instruction)
        numbers = np.broadcast_to(numbers, frame.count)
        where = places(frame, addresses, offset)
        if kind == ("init",):
            frame.batch.shared.store(
                frame, instruction, addresses, offset, _WIDTH, np.zeros(1, np.uint64)
            )
        else:
            frame.batch.shared.update(frame, instruction, addresses, offset, _WIDTH, _OBJECT)
        if kind[0] == "arrive":
            frame.batch.order.tick()
        found = [
            _serve(frame, instruction, kind, semantics, i, int(at), int(numbers[i]))
            for i, at in enumerate(where)
        ]
        if slot is not None:
            frame.regs[slot] = np.array(found, np.uint64)

    reads = tuple(r for s in (base, number) if s is not None for r in operands.register_read(s))
    return Step(run, reads, () if slot is None else (slot,))


def _counts(kind: tuple[str, ...]) -> tuple[int, ...]:
    """How many operands there are beside an arrival's state, which comes first."""
    return {
        "init": (2,),
        "inval": (1,),
        "arrive": (1, 2),
        "expect_tx": (2,),
        "arrive.expect_tx": (2,),
    }[".".join(kind)]


def _sink(operands: Operands, instruction: Instruction, target: Operand) -> int | None:
    """The slot of an arrival's state, or None for `_`."""
    if isinstance(target, Name) and target.name == "_":
        return None
    return operands.destination(target, _U64, instruction)[0]


def _serve(
    frame: Frame,
    instruction: Instruction,
    kind: tuple[str, ...],
    semantics: Semantics,
    position: int,
    at: int,
    number: int,
) -> int:
    known = mbarriers(frame)
    if kind == ("init",):
        if at in known.objects or not 0 < number <= _LARGEST:
            what = (
                "is one already, without mbarrier.inval"
                if at in known.objects
                else f"cannot expect {number}"
            )
            raise frame.fault(MbarrierMisuse, instruction, position, f"{name(frame, at)} {what}")
        known.objects[at] = Mbarrier(number, number)
        return 0
    if kind == ("inval",):
        known.find(frame, instruction, position, at)
        del known.objects[at]
        return 0
    if kind == ("expect_tx",):
        return known.change(frame, instruction, position, at, expect=number)
    _, released = frame.batch.order.released(int(frame.all_lanes[position]), semantics)
    arrivals, expect = (number, 0) if kind == ("arrive",) else (1, number)
    return known.change(
        frame, instruction, position, at, arrivals=arrivals, expect=expect, released=released
    )
