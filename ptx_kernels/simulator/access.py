"""Memory accesses of one instruction, one per lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .errors import SimulationError
from .frame import Frame
from .text.program import Instruction


class Access(NamedTuple):
    """One memory access per lane of a frame: `width` bytes at `addresses` + `offset`.

    Attributes:
      addresses: shape (lanes of the frame,), or (1,) if all lanes use the same address.
    """

    frame: Frame
    instruction: Instruction
    addresses: np.ndarray
    offset: int
    width: int

    def subset(self, positions: np.ndarray) -> Access:
        """Returns the accesses of some lanes, given by position in the frame."""
        addresses = self.addresses
        return self._replace(
            frame=self.frame.subset(positions),
            addresses=addresses if addresses.size == 1 else addresses[positions],
        )

    def fault(self, error: type[SimulationError], position: int, what: str) -> SimulationError:
        """Returns an error for the lane at this position in the frame."""
        return self.frame.fault(error, self.instruction, position, what)


class Located(NamedTuple):
    """Memory accesses whose addresses have been resolved to items of one memory.

    Attributes:
      items: index of each lane's item of `width` bytes, shape (lanes of the frame,).
      origin: address of item 0 if the memory is one of several buffers, else 0.
      place: function from a position in the frame to text that names the accessed place, for
        errors.
    """

    frame: Frame
    instruction: Instruction
    items: np.ndarray
    width: int
    origin: int
    place: Callable[[int], str]

    def fault(self, error: type[SimulationError], position: int, what: str) -> SimulationError:
        """Returns an error for the lane at this position in the frame."""
        told = f"{self.place(position)}: {what}"
        return self.frame.fault(error, self.instruction, position, told)


#: Raises if an access touches bytes that it must not. The second argument is "reads", "writes" or
#: "updates".
Guard = Callable[[Located, str], None]
