"""Shared memory of a batch of blocks: bounds, alignment, unwritten bytes, races."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .errors import Misaligned, OutOfBounds, SharedRace
from .frame import Frame
from .memory import Change, item_view
from .program import SHARED_BASE, Instruction
from .shadow import Describe, Shadow

if TYPE_CHECKING:
    from .async_copy import AsyncCopies
    from .mbarrier import Mbarriers


class SharedMemory:
    def __init__(self, blocks: int, nbytes: int) -> None:
        """`nbytes` per block."""
        self.nbytes = nbytes
        self.stride = -(-nbytes // 16) * 16
        data = np.zeros(blocks * self.stride, np.uint8)
        self.views = {width: item_view(data, width) for width in (1, 2, 4, 8, 16)}
        self.shadow = Shadow(data.size, SharedRace, between_blocks=False, must_be_written=True)
        self.copies: AsyncCopies | None = None  # there once the kernel issues one
        self.mbarriers: Mbarriers | None = None  # there once the kernel makes one

    def load(
        self, frame: Frame, instruction: Instruction, addresses: np.ndarray, offset: int, width: int
    ) -> np.ndarray:
        """One item of `width` bytes per lane, shape (lanes of the frame,)."""
        index = self._locate(frame, instruction, addresses, offset, width)
        if self.copies is not None:
            self.copies.check(frame, instruction, index, width, "reads")
        self.shadow.read(frame, instruction, index, width, self._describe(frame, index, width))
        if frame.batch.traffic is not None:
            frame.batch.traffic.count_shared(frame, instruction, index, width)
        return self.views[width].take(index)

    def store(
        self, frame: Frame, instruction: Instruction, addresses: np.ndarray, offset: int, width: int, items: np.ndarray
    ) -> None:
        """Stores items, shape (lanes of the frame,) or (1,); within a warp the highest lane wins."""
        index = self._locate(frame, instruction, addresses, offset, width)
        if self.copies is not None:
            self.copies.check(frame, instruction, index, width, "writes")
        self.shadow.write(frame, instruction, index, width, self._describe(frame, index, width))
        if frame.batch.traffic is not None:
            frame.batch.traffic.count_shared(frame, instruction, index, width)
        frame.batch.scatter(self.views[width], index, items)

    def update(
        self, frame: Frame, instruction: Instruction, addresses: np.ndarray, offset: int, width: int, change: Change
    ) -> np.ndarray:
        """Atomic updates at one address per lane; what each lane found, as items."""
        index = self._locate(frame, instruction, addresses, offset, width)
        if self.copies is not None:
            self.copies.check(frame, instruction, index, width, "updates")
        self.shadow.update(frame, instruction, index, width, self._describe(frame, index, width))
        if frame.batch.traffic is not None:
            frame.batch.traffic.count_shared(frame, instruction, index, width)
        return change(self.views[width], index, np.arange(frame.count))

    def _locate(
        self, frame: Frame, instruction: Instruction, addresses: np.ndarray, offset: int, width: int
    ) -> np.ndarray:
        """Item index per lane, shape (lanes of the frame,)."""
        offsets = addresses.astype(np.int64) + (offset - SHARED_BASE)
        low, high = int(offsets.min()), int(offsets.max())
        if low < 0 or high > self.nbytes - width:
            position = int(np.argmax((offsets < 0) | (offsets > self.nbytes - width)))
            raise frame.fault(
                OutOfBounds,
                instruction,
                position,
                f"shared offset {int(offsets[position])} "
                f"({width} bytes): the block has {self.nbytes} bytes of shared memory",
            )
        if int(np.bitwise_or.reduce(offsets)) & (width - 1):
            position = int(np.argmax(offsets & (width - 1) != 0))
            raise frame.fault(
                Misaligned,
                instruction,
                position,
                f"shared offset {int(offsets[position])} is no multiple of {width} bytes",
            )
        starts = frame.of_lanes(frame.batch.block_of_lane) * self.stride
        return (offsets + starts) >> (width.bit_length() - 1)

    def _describe(self, frame: Frame, index: np.ndarray, width: int) -> Describe:
        return lambda position: frame.batch.program.shared_name(int(index[position]) * width % self.stride)
