"""Access: what an instruction does to a memory, lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .errors import SimulationError
from .frame import Frame
from .text.program import Instruction


class Access(NamedTuple):
    """Accesses of `width` bytes at `addresses` + `offset`.

    Attributes:
      addresses: shape (lanes of the frame,), or (1,) where all lanes have the same.
    """

    frame: Frame
    instruction: Instruction
    addresses: np.ndarray
    offset: int
    width: int

    def subset(self, positions: np.ndarray) -> Access:
        """The accesses of some lanes, by their positions in the frame."""
        addresses = self.addresses
        return self._replace(
            frame=self.frame.subset(positions),
            addresses=addresses if addresses.size == 1 else addresses[positions],
        )

    def fault(self, error: type[SimulationError], position: int, what: str) -> SimulationError:
        """An error at the lane with this position in the frame."""
        return self.frame.fault(error, self.instruction, position, what)


class Located(NamedTuple):
    """An access whose bytes a memory has found.

    Attributes:
      items: of `width` bytes, by their index, shape (lanes of the frame,).
      origin: address of item 0 where the memory is one of several buffers, else 0.
      place: position in the frame -> the place, in words.
    """

    frame: Frame
    instruction: Instruction
    items: np.ndarray
    width: int
    origin: int
    place: Callable[[int], str]

    def fault(self, error: type[SimulationError], position: int, what: str) -> SimulationError:
        """An error at the lane with this position in the frame."""
        told = f"{self.place(position)}: {what}"
        return self.frame.fault(error, self.instruction, position, told)


#: Raises if an access meets bytes that it must not; told "reads", "writes" or "updates".
Guard = Callable[[Located, str], None]
