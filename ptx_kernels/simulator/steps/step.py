"""Step: one PTX instruction as a Python function of a batch and the lanes that execute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..batch import Batch
from ..frame import Frame
from ..text.program import Instruction

Run = Callable[[Batch, Frame], None]


class Wait(Protocol):
    """Condition that lanes wait for before they execute an instruction.

    Attributes:
      can_fail: whether the instruction may run although the condition does not hold, once no other
        lane can run.
    """

    instruction: Instruction
    can_fail: bool

    def passes(self, batch: Batch, frame: Frame) -> np.ndarray:
        """Returns the mask of lanes that need not wait, shape (lanes of the frame,)."""

    def awaited(self, batch: Batch, frame: Frame) -> list[int]:
        """Returns the index of the mbarrier that each lane waits for, for `Batch.deliveries`."""

    def give_up(self, batch: Batch, lanes: np.ndarray) -> None:
        """Lets these lanes continue although the condition does not hold."""

    def describe(self, batch: Batch, frame: Frame) -> str:
        """Describes the condition of the frame's first lane."""


@dataclass(frozen=True)
class Step:
    """One compiled instruction.

    Attributes:
      reads, writes: slots of registers.
      kills: whether the instruction overwrites `writes` in every lane.
      synchronizes: whether the instruction may order accesses of threads by other means than
        barriers.
    """

    run: Run
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    kills: bool = True
    synchronizes: bool = False
    wait: Wait | None = None
