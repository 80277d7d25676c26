"""Simulates `mbarrier.test_wait` and `mbarrier.try_wait`: parks lanes until the phase completes."""

from __future__ import annotations

import numpy as np

from ..batch import Batch
from ..frame import Frame
from ..races.vector_clock import NOTHING
from ..steps.binding import Binding, Call, Place
from ..steps.meaning import means, waits
from .mbarrier import Mbarriers, places_of, semantics_of, touch

_NAMES = (
    "mbarrier.test_wait",
    "mbarrier.test_wait.parity",
    "mbarrier.try_wait",
    "mbarrier.try_wait.parity",
)


@waits(*_NAMES)
class PhaseWait:
    """Condition of a waiting instruction: the phase of its mbarrier is complete."""

    def __init__(self, bound: Binding) -> None:
        self._bound, self.instruction = bound, bound.instruction
        self.can_fail = bound.spelled.row.name.startswith("mbarrier.test_wait")

    def _operands(self, batch: Batch, frame: Frame) -> tuple[Call, Place, np.ndarray]:
        object_, phase, *_ = self._bound.values(frame)
        return self._bound.call(batch, frame), object_, phase

    def awaited(self, batch: Batch, frame: Frame) -> list[int]:
        call, object_, _ = self._operands(batch, frame)
        return places_of(call, object_)

    def describe(self, batch: Batch, frame: Frame) -> str:
        return f"a phase of {batch.state(Mbarriers).name(self.awaited(batch, frame)[0])}"

    def passes(self, batch: Batch, frame: Frame) -> np.ndarray:
        """Returns the mask of lanes that need not be parked, shape (lanes of the frame,)."""
        done = _complete(*self._operands(batch, frame))
        if self.instruction.guard is not None:
            register, negated = self.instruction.guard
            # lanes whose guard fails do not execute it
            done |= frame.fetch(register.index, self.instruction) == negated
        return done | batch.state(Mbarriers).impatient[frame.all_lanes] if self.can_fail else done

    def give_up(self, batch: Batch, lanes: np.ndarray) -> None:
        batch.state(Mbarriers).impatient[lanes] = True


def _complete(call: Call, object_: Place, phase: np.ndarray) -> np.ndarray:
    """Returns the mask of lanes whose phase is complete, or whose mbarrier is missing.

    `wait` raises if the mbarrier is missing.
    """
    known, parity = call.batch.state(Mbarriers), "parity" in call.instruction.opcode
    given = call.every(phase)
    done = np.ones(call.frame.count, np.bool_)
    places = np.array(places_of(call, object_))
    for at in np.unique(places):
        if barrier := known.objects.get(int(at)):
            here = given[places == at]
            done[places == at] = here & 1 != barrier.phase & 1 if parity else here != barrier.phase
    return done


@means(*_NAMES, synchronizes=True)
def wait(
    call: Call, object_: Place, phase: np.ndarray, patience: np.ndarray | None = None
) -> np.ndarray:
    """Returns the mask of lanes whose phase is complete. `patience` is a hint and is ignored."""
    known, happens_before = call.batch.state(Mbarriers), call.batch.happens_before
    semantics, lanes = semantics_of(call.words), call.frame.all_lanes
    places = touch(call, object_)
    done = _complete(call, object_, phase)
    for position, at in enumerate(places):
        barrier = known.find(call.frame, call.instruction, position, at)
        if done[position]:
            happens_before.observe(int(lanes[position]), NOTHING, barrier.completed, semantics)
    known.impatient[lanes] = False
    return done
