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
    """A condition that lanes wait for before they execute an instruction.

    Attributes:
      can_fail: whether the instruction may run without it, once nobody else can go on.
    """

    instruction: Instruction
    can_fail: bool

    def passes(self, batch: Batch, frame: Frame) -> np.ndarray:
        """Mask of the lanes that need not wait, shape (lanes of the frame,)."""

    def awaited(self, batch: Batch, frame: Frame) -> list[int]:
        """Number of what each lane waits for, as `Batch.deliveries` take it."""

    def give_up(self, batch: Batch, lanes: np.ndarray) -> None:
        """These lanes may go on, and find that the condition does not hold."""

    def describe(self, batch: Batch, frame: Frame) -> str:
        """The condition of the frame's first lane, in words."""


@dataclass(frozen=True)
class Step:
    """One instruction.

    Attributes:
      reads, writes: slots of registers.
      kills: it overwrites `writes` in every lane.
      synchronizes: it may order accesses of threads otherwise than barriers do.
    """

    run: Run
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    kills: bool = True
    synchronizes: bool = False
    wait: Wait | None = None
