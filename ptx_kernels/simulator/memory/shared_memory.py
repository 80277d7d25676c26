"""Shared memory of a batch of blocks: bounds, alignment, unwritten bytes, races."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import Misaligned, OutOfBounds, SharedRace
from ..frame import Frame
from ..races.conflicts import READING, Kind, kind_of
from ..races.shadow import Access, Shadow
from ..races.vector_clock import Places, Strong
from ..text.program import SHARED_BASE, Instruction
from .global_memory import item_view

if TYPE_CHECKING:
    from ..hopper.mbarrier import Mbarriers
    from ..steps.async_copy import AsyncCopies


class SharedMemory:
    def __init__(self, blocks: int, nbytes: int, *, synchronizes: bool = False) -> None:
        """`nbytes` per block; `synchronizes`: see `Shadow`."""
        self.nbytes = nbytes
        self.stride = -(-nbytes // 16) * 16
        data = np.zeros(blocks * self.stride, np.uint8)
        self.views = {width: item_view(data, width) for width in (1, 2, 4, 8, 16)}
        self.shadow = Shadow(
            data.size,
            SharedRace,
            between_blocks=False,
            must_be_written=True,
            synchronizes=synchronizes,
        )
        self.places = Places()
        self.copies: AsyncCopies | None = None  # there once the kernel issues one
        self.mbarriers: Mbarriers | None = None  # there once the kernel makes one

    def load(
        self, frame: Frame, instruction: Instruction, addresses: np.ndarray, offset: int, width: int
    ) -> np.ndarray:
        """One item of `width` bytes per lane, shape (lanes of the frame,)."""
        index = self._locate(frame, instruction, addresses, offset, width)
        self._touch("read", frame, instruction, index, width)
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
        """Stores items, shape (lanes of the frame,) or (1,); within a warp the highest lane
        wins.
        """
        index = self._locate(frame, instruction, addresses, offset, width)
        self._touch("write", frame, instruction, index, width)
        frame.batch.scatter(self.views[width], index, items)
        if self.places.known:
            self.places.overwrite(0, index, width)

    def update(
        self,
        frame: Frame,
        instruction: Instruction,
        addresses: np.ndarray,
        offset: int,
        width: int,
        strong: Strong,
    ) -> np.ndarray:
        """Atomic updates, or strong loads or stores, at one address per lane; what each lane found,
        as items.
        """
        index = self._locate(frame, instruction, addresses, offset, width)
        turns = frame.batch.turns(frame.count)
        self._touch(kind_of(strong), frame, instruction, index, width, strong, turns)
        found = strong.change(self.views[width], index, np.arange(frame.count), turns)
        frame.batch.order.synchronize(frame, strong, self.places, 0, index, width, turns)
        return found

    def start_copy(
        self, frame: Frame, instruction: Instruction, addresses: np.ndarray, width: int
    ) -> None:
        """A bulk copy to one address per lane begins: from now on the bytes may change."""
        self._start("write", frame, instruction, addresses, width)

    def end_copy(
        self,
        frame: Frame,
        instruction: Instruction,
        addresses: np.ndarray,
        items: np.ndarray,
        barriers: np.ndarray,
    ) -> None:
        """Its bytes arrive, which these mbarriers count, shape (lanes of the frame,)."""
        width = items.dtype.itemsize
        index = self._locate(frame, instruction, addresses, 0, width)
        self.shadow.end_copy(frame, index, width, barriers)
        frame.batch.scatter(self.views[width], index, items)

    def start_fetch(
        self, frame: Frame, instruction: Instruction, addresses: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """A bulk copy from one address per lane begins: (item of each lane, what is there until it
        ends).
        """
        index = self._start("fetch", frame, instruction, addresses, width)
        return index, self.views[width].take(index)

    def end_fetch(
        self, frame: Frame, instruction: Instruction, index: np.ndarray, width: int
    ) -> None:
        """The frame's lanes have waited for it: that they read it now is what others have to be in
        order with.
        """
        self.shadow.access("fetch", self._access(frame, instruction, index, width))

    def _start(
        self, kind: Kind, frame: Frame, instruction: Instruction, addresses: np.ndarray, width: int
    ) -> np.ndarray:
        index = self._locate(frame, instruction, addresses, 0, width)
        access = self._access(frame, instruction, index, width)
        self._check_copies(access, "writes" if kind == "write" else "reads")
        self.shadow.start_copy(kind, access)
        if frame.batch.traffic is not None:
            frame.batch.traffic.count_shared(frame, instruction, index, width)
        return index

    def _touch(
        self,
        kind: Kind,
        frame: Frame,
        instruction: Instruction,
        index: np.ndarray,
        width: int,
        strong: Strong | None = None,
        turns: np.ndarray | None = None,
    ) -> None:
        """What all accesses share: are the bytes there, does it race, what moves."""
        what = "reads" if kind in READING else "writes" if kind == "write" else "updates"
        access = self._access(frame, instruction, index, width)
        self._check_copies(access, what)
        self.shadow.access(kind, access, strong, turns)
        if frame.batch.traffic is not None:
            frame.batch.traffic.count_shared(frame, instruction, index, width)

    def _check_copies(self, access: Access, what: str) -> None:
        if self.copies is not None:
            self.copies.check(access.frame, access.instruction, access.items, access.width, what)
        stores = access.frame.batch.bulk_stores
        if stores is not None and what != "reads":
            stores.check_source(access, what)

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

    def _access(
        self, frame: Frame, instruction: Instruction, index: np.ndarray, width: int
    ) -> Access:
        def describe(position: int) -> str:
            return frame.batch.program.shared_name(int(index[position]) * width % self.stride)

        return Access(frame, instruction, index, width, describe)
