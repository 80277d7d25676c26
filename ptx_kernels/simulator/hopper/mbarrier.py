"""`mbarrier`: barriers in shared memory that count arrivals of threads and bytes of copies. PTX ISA
9.1, 9.7.13.15.

A phase is complete when all expected arrivals and bytes are there; then the next one starts. Who
waits for a phase is parked by the machine until then. An arrival releases what the thread has seen,
a wait that succeeds acquires what was released up to the phase's completion: accesses of threads
that did not arrive are concurrent with those of the threads that wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...ptx.instructions import Version
from ...ptx.types import TYPES
from ..access import Access
from ..address_space import SHARED_BASE
from ..batch import Batch
from ..errors import MbarrierMisuse, UnknownInstruction
from ..frame import Frame
from ..races.strong import Semantics, Strong, unchanged
from ..races.vector_clock import NOTHING, VectorClock
from ..steps.loads_stores import address_of
from ..steps.operands import Operands
from ..steps.registry import compiles
from ..steps.step import Step
from ..text.program import Instruction, Name, Operand

_MODIFIERS = {"release", "acquire", "relaxed", "cta", "cluster", "shared", "shared::cta", "b64"}
WIDTH = 8  # bytes of an object
_LARGEST = (1 << 20) - 1  # count of arrivals, and of bytes under way
_U32, _U64 = TYPES["u32"], TYPES["u64"]

#: An access to an object, which is no released word of its own: clocks go by phases.
OBJECT = Strong(unchanged, returns=False)


@dataclass
class Mbarrier:
    """An object's state.

    Attributes:
      transactions: bytes expected and not there yet.
      released: by all arrivals so far; `completed`: by those before the last phase's end.
    """

    expected: int
    pending: int
    transactions: int = 0
    phase: int = 0
    released: VectorClock = NOTHING
    completed: VectorClock = NOTHING


class Mbarriers:
    """The objects in a batch's shared memory, by their offset in it divided by 8.

    Attributes:
      impatient: lanes whose test_wait is to fail, as nobody else can go on.
    """

    def __init__(self, batch: Batch) -> None:
        self.shared = batch.shared
        self.objects: dict[int, Mbarrier] = {}
        self.impatient = np.zeros(batch.layout.lanes, np.bool_)

    def name(self, at: int) -> str:
        return self.shared.name(at * WIDTH)

    def places(self, frame: Frame, addresses: np.ndarray, offset: int) -> np.ndarray:
        """Places of the objects at these shared addresses, shape (lanes of the frame,)."""
        starts = self.shared.starts(frame)
        return (addresses.astype(np.int64) + (offset - SHARED_BASE) + starts) // WIDTH

    def find(self, frame: Frame, instruction: Instruction, position: int, at: int) -> Mbarrier:
        found = self.objects.get(at)
        if found is None:
            told = f"{self.name(at)}: no mbarrier.init made this"
            raise frame.fault(MbarrierMisuse, instruction, position, told)
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
        released: VectorClock = NOTHING,
    ) -> int:
        """Expects bytes, counts arrivals and bytes that have arrived, with what they release.

        Returns the phase before that.
        """
        barrier = self.find(frame, instruction, position, at)
        before = barrier.phase
        barrier.released = barrier.released.join(released)
        barrier.transactions += expect - arrived
        barrier.pending -= arrivals
        if barrier.pending < 0 or not abs(barrier.transactions) <= _LARGEST:
            more = barrier.pending + arrivals
            what = (
                f"{arrivals} arrivals, of which phase {before} expects {more} more"
                if barrier.pending < 0
                else f"{barrier.transactions} bytes are to come, and {_LARGEST} can be counted"
            )
            raise frame.fault(MbarrierMisuse, instruction, position, f"{self.name(at)}: {what}")
        if barrier.pending == 0 and barrier.transactions == 0:
            barrier.phase, barrier.pending = before + 1, barrier.expected
            barrier.completed = barrier.released
        return before


def semantics_of(opcode: str) -> Semantics:
    """Arrivals release and waits acquire unless they are relaxed; other blocks reach no object."""
    ordered = "relaxed" not in opcode.split(".")
    return Semantics(acquire=ordered, release=ordered, wide=False)


def kind_of(opcode: str) -> tuple[str, ...]:
    return tuple(part for part in opcode.split(".")[1:] if part not in _MODIFIERS)


_NEEDS: dict[tuple[str, ...], Version] = {
    ("init",): ((7, 0), 80),
    ("inval",): ((7, 0), 80),
    ("arrive",): ((7, 0), 80),
    ("expect_tx",): ((8, 0), 90),
    ("arrive", "expect_tx"): ((8, 0), 90),
}

_NEEDS_SINK: Version = ((7, 1), 80)  # `_` in the place of an arrival's state
_NEEDS_COUNT: Version = ((7, 8), 90)  # of arrivals


@compiles("mbarrier")
def compile_mbarrier(operands: Operands, instruction: Instruction) -> Step:
    kind = kind_of(instruction.opcode)
    if kind not in _NEEDS or not instruction.opcode.endswith(".b64"):
        raise operands.error(
            UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction"
        )
    operands.needs(instruction, _NEEDS[kind])
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
    semantics = semantics_of(instruction.opcode)

    def run(batch: Batch, frame: Frame) -> None:
        known = batch.state(Mbarriers)
        addresses = np.broadcast_to(frame.fetch(base, instruction), frame.count)
        numbers = np.ones(1, np.uint32) if number is None else frame.fetch(number, instruction)
        numbers = np.broadcast_to(numbers, frame.count)
        where = known.places(frame, addresses, offset)
        access = Access(frame, instruction, addresses, offset, WIDTH)
        if kind == ("init",):
            batch.shared.store(access, np.zeros(1, np.uint64))
        else:
            batch.shared.update(access, OBJECT)
        if kind[0] == "arrive":
            batch.order.tick()
        found = [
            _serve(batch, frame, instruction, kind, semantics, i, int(at), int(numbers[i]))
            for i, at in enumerate(where)
        ]
        if slot is not None:
            frame.regs[slot] = np.array(found, np.uint64)

    reads = tuple(r for s in (base, number) if s is not None for r in operands.register_read(s))
    return Step(run, reads, () if slot is None else (slot,), synchronizes=True)


def _counts(kind: tuple[str, ...]) -> tuple[int, ...]:
    """Numbers of operands beside an arrival's state, which comes first."""
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
    batch: Batch,
    frame: Frame,
    instruction: Instruction,
    kind: tuple[str, ...],
    semantics: Semantics,
    position: int,
    at: int,
    number: int,
) -> int:
    known = batch.state(Mbarriers)
    if kind == ("init",):
        if at in known.objects or not 0 < number <= _LARGEST:
            what = (
                "is one already, without mbarrier.inval"
                if at in known.objects
                else f"cannot expect {number}"
            )
            raise frame.fault(MbarrierMisuse, instruction, position, f"{known.name(at)} {what}")
        known.objects[at] = Mbarrier(number, number)
        return 0
    if kind == ("inval",):
        known.find(frame, instruction, position, at)
        del known.objects[at]
        return 0
    if kind == ("expect_tx",):
        return known.change(frame, instruction, position, at, expect=number)
    _, released = batch.order.released(int(frame.all_lanes[position]), semantics)
    arrivals, expect = (number, 0) if kind == ("arrive",) else (1, number)
    return known.change(
        frame, instruction, position, at, arrivals=arrivals, expect=expect, released=released
    )
