"""Shared memory of a batch of blocks, with checks for unwritten bytes and for races between warps.

Per granule (the smallest shared access of the program) two stamps remember the last writer and the last reader:
epoch * 64 + warp, where the epoch counts the block's barriers from 1. Two stamps of one epoch that differ are
two warps without a barrier between them. Order within a warp is not checked: lanes run in lockstep here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .errors import Misaligned, OutOfBounds, SharedRace, UninitializedRead
from .frame import Frame
from .memory import item_view
from .program import SHARED_BASE, Instruction

if TYPE_CHECKING:
    from .async_copy import AsyncCopies

_EPOCH = 64
_SEVERAL = 63  # in a reader's stamp: more than one warp (a block has at most 32)


class SharedMemory:
    def __init__(self, blocks: int, nbytes: int, granule: int) -> None:
        """`nbytes` per block; granule: bytes that one stamp covers, no more than any access's element."""
        self.nbytes = nbytes
        self.stride = -(-nbytes // 16) * 16
        data = np.zeros(blocks * self.stride, np.uint8)
        self.views = {width: item_view(data, width) for width in (1, 2, 4, 8, 16)}
        self.granule = granule
        self.writers = np.zeros(data.size // granule, np.uint32)
        self.readers = np.zeros(data.size // granule, np.uint32)
        self.copies: AsyncCopies | None = None  # there once the kernel issues one

    def load(
        self, frame: Frame, instruction: Instruction, addresses: np.ndarray, offset: int, width: int
    ) -> np.ndarray:
        """One item of `width` bytes per lane, shape (lanes of the frame,)."""
        index = self._locate(frame, instruction, addresses, offset, width)
        if self.copies is not None:
            self.copies.check(frame, instruction, index, width, "reads")
        stamps = frame.of_lanes(frame.batch.stamps())[:, None]
        writers = self.writers.reshape(-1, width // self.granule)
        last = writers.take(index, axis=0)
        if not last.all():
            position = int(np.argmax((last == 0).any(axis=1)))
            raise frame.fault(
                UninitializedRead,
                instruction,
                position,
                f"{self._describe(frame, index, position, width)}: nobody wrote all of these {width} bytes",
            )
        self._check_race(frame, instruction, index, width, last, stamps, "reads what {} wrote")
        readers = self.readers.reshape(-1, width // self.granule)
        before = readers.take(index, axis=0)
        if not (before == stamps).all():
            joined = np.where(_same_epoch(before, stamps), stamps | np.uint32(_SEVERAL), stamps)
            readers[index] = joined
            after = readers.take(index, axis=0)
            lost = (after != joined).any(axis=1)  # lanes whose granules another warp reads at this very instruction
            readers[index[lost]] = np.where(after != joined, after | np.uint32(_SEVERAL), after)[lost]
        return self.views[width].take(index)

    def store(
        self, frame: Frame, instruction: Instruction, addresses: np.ndarray, offset: int, width: int, items: np.ndarray
    ) -> None:
        """Stores items, shape (lanes of the frame,) or (1,); within a warp the highest lane wins."""
        index = self._locate(frame, instruction, addresses, offset, width)
        if self.copies is not None:
            self.copies.check(frame, instruction, index, width, "writes")
        stamps = frame.of_lanes(frame.batch.stamps())[:, None]
        for records, what in ((self.writers, "writes what {} wrote"), (self.readers, "writes what {} read")):
            before = records.reshape(-1, width // self.granule).take(index, axis=0)
            self._check_race(frame, instruction, index, width, before, stamps, what)
        writers = self.writers.reshape(-1, width // self.granule)
        writers[index] = stamps
        self._check_race(
            frame,
            instruction,
            index,
            width,
            writers.take(index, axis=0),
            stamps,
            "writes, at the same instruction, what {} wrote",
        )
        self.views[width][index] = items

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

    def _check_race(
        self,
        frame: Frame,
        instruction: Instruction,
        index: np.ndarray,
        width: int,
        records: np.ndarray,
        stamps: np.ndarray,
        what: str,
    ) -> None:
        conflict = _same_epoch(records, stamps)
        if not conflict.any():
            return
        position = int(np.argmax(conflict.any(axis=1)))
        other = int(records[position][conflict[position]][0]) % _EPOCH
        who = "several warps" if other == _SEVERAL else f"warp {other}"
        raise frame.fault(
            SharedRace,
            instruction,
            position,
            f"{self._describe(frame, index, position, width)}: warp "
            f"{int(stamps[position, 0]) % _EPOCH} {what.format(who)}, without a barrier between",
        )

    def _describe(self, frame: Frame, index: np.ndarray, position: int, width: int) -> str:
        offset = int(index[position]) * width % self.stride
        return frame.batch.program.shared_name(offset)


def _same_epoch(records: np.ndarray, stamps: np.ndarray) -> np.ndarray:
    """Where a record is of the stamp's epoch, but of another warp."""
    return (records ^ stamps) - np.uint32(1) < np.uint32(_EPOCH - 1)  # equal stamps wrap to 2^32 - 1


def stamp(epochs: np.ndarray, warps: np.ndarray) -> np.ndarray:
    return (epochs * _EPOCH + warps).astype(np.uint32)
