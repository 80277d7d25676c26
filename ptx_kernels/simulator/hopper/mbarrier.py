"""Simulates `mbarrier`: barriers in shared memory that count threads' arrivals and copied bytes.

PTX ISA 9.1, 9.7.13.15 defines the instructions. A phase completes when all expected arrivals and
bytes have come in; then the next phase starts. The machine parks threads that wait for a phase. An
arrival releases what the thread has seen. A successful wait acquires what was released up to the
phase's completion. Accesses of threads that did not arrive are concurrent with those of the threads
that wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...ptx.instructions import Words
from ..address_space import SHARED_BASE
from ..batch import Batch
from ..errors import MbarrierMisuse
from ..frame import Frame
from ..races.strong import Semantics, Strong, unchanged
from ..races.vector_clock import NOTHING, VectorClock
from ..steps.binding import Call, Place
from ..steps.meaning import means
from ..text.program import Instruction

WIDTH = 8  # bytes of an object
_LARGEST = (1 << 20) - 1  # limit of the arrival count, and of the bytes in flight

#: Access to an mbarrier object. The object is not a released word: clocks are kept per phase.
OBJECT = Strong(unchanged, returns=False)


@dataclass
class Mbarrier:
    """State of one mbarrier object in shared memory.

    Attributes:
      transactions: bytes expected that have not arrived.
      released: vector clock of all arrivals so far.
      completed: vector clock of the arrivals before the last phase completed.
    """

    expected: int
    pending: int
    transactions: int = 0
    phase: int = 0
    released: VectorClock = NOTHING
    completed: VectorClock = NOTHING


class Mbarriers:
    """The mbarrier objects in a batch's shared memory, by index: their byte offset divided by 8.

    Attributes:
      impatient: lanes whose test_wait must fail, because no other lane can run.
    """

    def __init__(self, batch: Batch) -> None:
        self.shared = batch.shared
        self.objects: dict[int, Mbarrier] = {}
        self.impatient = np.zeros(batch.layout.lanes, np.bool_)

    def name(self, at: int) -> str:
        return self.shared.name(at * WIDTH)

    def places(self, frame: Frame, addresses: np.ndarray, offset: int) -> np.ndarray:
        """Returns the indices of the mbarriers at shared addresses, shape (lanes of the frame,)."""
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
        """Adds expected bytes, arrivals and arrived bytes to an mbarrier; releases a vector clock.

        Returns the phase before the change.
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


def semantics_of(words: Words) -> Semantics:
    """Returns the semantics of an mbarrier opcode, at thread block scope.

    Arrivals release and waits acquire, unless relaxed. Other thread blocks cannot reach the object.
    """
    ordered = words["order"] != "relaxed"
    return Semantics(acquire=ordered, release=ordered, wide=False)


def touch(call: Call, object_: Place) -> list[int]:
    """Records each lane's access to its mbarrier object; returns the objects' indices."""
    access = call.access_each(object_, WIDTH)
    call.batch.shared.update(access, OBJECT)
    return places_of(call, object_)


def places_of(call: Call, object_: Place) -> list[int]:
    """Returns the index of each lane's mbarrier object."""
    known, addresses = call.batch.state(Mbarriers), call.every(object_.addresses)
    return known.places(call.frame, addresses, object_.offset).tolist()


@means("mbarrier.init", synchronizes=True)
def init(call: Call, object_: Place, count: np.ndarray) -> None:
    call.batch.shared.store(call.access_each(object_, WIDTH), np.zeros(1, np.uint64))
    known, counts = call.batch.state(Mbarriers), call.every(count).tolist()
    for position, (at, number) in enumerate(zip(places_of(call, object_), counts, strict=True)):
        if at in known.objects:
            what = f"{known.name(at)} is one already, without mbarrier.inval"
            raise call.fault(MbarrierMisuse, position, what)
        if not 0 < number <= _LARGEST:
            what = f"{known.name(at)} cannot expect {number}"
            raise call.fault(MbarrierMisuse, position, what)
        known.objects[at] = Mbarrier(number, number)


@means("mbarrier.inval", synchronizes=True)
def invalidate(call: Call, object_: Place) -> None:
    known = call.batch.state(Mbarriers)
    for position, at in enumerate(touch(call, object_)):
        known.find(call.frame, call.instruction, position, at)
        del known.objects[at]


@means("mbarrier.expect_tx", synchronizes=True)
def expect(call: Call, object_: Place, nbytes: np.ndarray) -> None:
    known, expected = call.batch.state(Mbarriers), call.every(nbytes).tolist()
    for position, at in enumerate(touch(call, object_)):
        known.change(call.frame, call.instruction, position, at, expect=expected[position])


@means("mbarrier.arrive", synchronizes=True)
def arrive(call: Call, object_: Place, count: np.ndarray | None) -> np.ndarray:
    """Counts each lane's arrival; returns the phase that it arrived at."""
    arrivals = [1] * call.frame.count if count is None else call.every(count).tolist()
    return _arrive(call, object_, arrivals, [0] * call.frame.count)


@means("mbarrier.arrive.expect_tx", synchronizes=True)
def arrive_expecting(call: Call, object_: Place, nbytes: np.ndarray) -> np.ndarray:
    """Adds to the bytes that the phase expects, counts each lane's arrival; returns the phase."""
    return _arrive(call, object_, [1] * call.frame.count, call.every(nbytes).tolist())


def _arrive(call: Call, object_: Place, arrivals: list[int], expect: list[int]) -> np.ndarray:
    known, happens_before, semantics = (
        call.batch.state(Mbarriers),
        call.batch.happens_before,
        semantics_of(call.words),
    )
    places = touch(call, object_)
    happens_before.tick()
    phases = []
    for position, at in enumerate(places):
        _, released = happens_before.released(int(call.frame.all_lanes[position]), semantics)
        phases.append(
            known.change(
                call.frame,
                call.instruction,
                position,
                at,
                arrivals=arrivals[position],
                expect=expect[position],
                released=released,
            )
        )
    return np.array(phases, np.uint64)
