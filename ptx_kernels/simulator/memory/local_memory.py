"""Local memory: each thread's own bytes, checked for bounds, alignment and reads of what was never
written.
"""

from __future__ import annotations

import numpy as np

from ..errors import Misaligned, OutOfBounds, UninitializedRead
from ..frame import Frame
from ..text.program import LOCAL_BASE, Instruction
from .global_memory import item_view

_WIDTHS = (1, 2, 4, 8, 16)


class LocalMemory:
    def __init__(self, lanes: int, nbytes: int) -> None:
        """`nbytes` per thread."""
        self.nbytes = nbytes
        self.stride = -(-nbytes // 16) * 16
        data = np.zeros(lanes * self.stride, np.uint8)
        written = np.zeros(lanes * self.stride, np.uint8)
        self.views = {width: item_view(data, width) for width in _WIDTHS}
        self.written = {width: written.reshape(-1, width) for width in _WIDTHS}

    def load(
        self, frame: Frame, instruction: Instruction, addresses: np.ndarray, offset: int, width: int
    ) -> np.ndarray:
        """One item of `width` bytes per lane, shape (lanes of the frame,)."""
        index = self._locate(frame, instruction, addresses, offset, width)
        missing = ~self.written[width].take(index, axis=0).all(axis=1)
        if missing.any():
            position = int(np.argmax(missing))
            at = int(index[position]) * width % self.stride
            raise frame.fault(
                UninitializedRead,
                instruction,
                position,
                f"local offset {at}: read of {width} bytes never all written",
            )
        return self.views[width].take(index)

    def store(
        self,
        frame: Frame,
        instruction: Instruction,
        addresses: np.ndarray,
        offset: int,
        width: int,
        items: np.ndarray,
    ) -> None:
        """Stores items, shape (lanes of the frame,) or (1,)."""
        index = self._locate(frame, instruction, addresses, offset, width)
        self.views[width][index] = items
        self.written[width][index] = 1

    def _locate(
        self, frame: Frame, instruction: Instruction, addresses: np.ndarray, offset: int, width: int
    ) -> np.ndarray:
        """Item index per lane, shape (lanes of the frame,)."""
        offsets = np.broadcast_to(addresses.astype(np.int64) + (offset - LOCAL_BASE), frame.count)
        outside = (offsets < 0) | (offsets > self.nbytes - width)
        if outside.any():
            position = int(np.argmax(outside))
            raise frame.fault(
                OutOfBounds,
                instruction,
                position,
                f"local offset {int(offsets[position])} ({width} bytes): "
                f"the thread has {self.nbytes} bytes of local memory",
            )
        odd = offsets % width != 0
        if odd.any():
            position = int(np.argmax(odd))
            raise frame.fault(
                Misaligned,
                instruction,
                position,
                f"local offset {int(offsets[position])} is no multiple of {width} bytes",
            )
        return (frame.all_lanes * self.stride + offsets) // width
