"""Step: one instruction as a function of a batch and the lanes that execute it."""

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
      can_fail: whether the instruction may run without it once no other lane can run.
    """

    instruction: Instruction
    can_fail: bool

    def passes(self, batch: Batch, frame: Frame) -> np.ndarray:
        """Returns the mask of lanes that need not wait, shape (lanes of the frame,)."""

    def awaited(self, batch: Batch, frame: Frame) -> list[int]:
        """Returns the number of what each lane waits for, an argument of `Batch.deliveries`."""

    def give_up(self, batch: Batch, lanes: np.ndarray) -> None:
        """Lets these lanes continue although the condition does not hold."""

    def describe(self, batch: Batch, frame: Frame) -> str:
        """Describes the condition of the frame's first lane."""


@dataclass(frozen=True)
class Step:
    """One instruction.

    Attributes:
      reads, writes: slots of registers.
      kills: whether it overwrites `writes` in every lane.
      synchronizes: whether it may order accesses of threads by other means than barriers.
    """

    run: Run
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    kills: bool = True
    synchronizes: bool = False
    wait: Wait | None = None
