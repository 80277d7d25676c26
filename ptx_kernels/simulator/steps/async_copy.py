"""Simulates `cp.async`: copies from global to shared memory, in flight until the thread waits.

The bytes arrive as late as they may: at the wait of the thread that issued the copy. Accessing them
earlier is an error. The arrival counts as a store of that thread at its wait, so other threads need
a barrier after it, as after any store. PTX ISA 9.1, 9.7.9.25.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..access import Access
from ..batch import Batch
from ..errors import OutOfBounds
from ..frame import Frame
from ..memory.global_memory import GlobalMemory
from ..memory.in_flight import InFlight
from ..memory.items import ITEMS
from ..text.program import Instruction
from .binding import Call, Place
from .meaning import means


@dataclass
class Copy:
    """Copies in flight of one instruction; arrays have one entry per lane.

    Attributes:
      groups: number of the lane's group that contains the copy.
      targets: items of the batch's shared memory.
      items: the bytes that arrive.
    """

    instruction: Instruction
    lanes: np.ndarray
    groups: np.ndarray
    targets: np.ndarray
    items: np.ndarray

    def take(self, where: np.ndarray) -> Copy:
        arrays = (self.lanes, self.groups, self.targets, self.items)
        return Copy(self.instruction, *(x[where] for x in arrays))


class Groups:
    """Groups of each lane's asynchronous copies, numbered from 1; the last group is open."""

    def __init__(self, lanes: int) -> None:
        self._committed = np.zeros(lanes, np.int64)

    def open(self, lanes: np.ndarray) -> np.ndarray:
        """Returns the number of each lane's open group."""
        return self._committed[lanes] + 1

    def commit(self, frame: Frame) -> None:
        self._committed[frame.all_lanes] += 1

    def awaited(self, frame: Frame, pending: int) -> np.ndarray:
        """Returns the last group that each lane of the batch waits for; 0 or less if none.

        A lane of the frame waits for all of its groups except the `pending` youngest. Other lanes
        wait for none.
        """
        last = np.zeros_like(self._committed)
        last[frame.all_lanes] = self._committed[frame.all_lanes] - pending
        return last


def issuers(frame: Frame, lanes: np.ndarray) -> Frame:
    """Returns the frame of `lanes`, which issued copies; a lane may occur several times.

    All of them must be in `frame`.
    """
    return frame.subset(np.searchsorted(frame.all_lanes, lanes))


class AsyncCopies:
    """Asynchronous copies of a batch's lanes that are in flight, in groups."""

    def __init__(self, batch: Batch) -> None:
        self.shared = batch.shared
        self.in_flight = batch.state(shared_in_flight)
        self.groups = Groups(batch.layout.lanes)
        self.copies: list[Copy] = []

    def issue(
        self, frame: Frame, instruction: Instruction, addresses: np.ndarray, items: np.ndarray
    ) -> None:
        """Starts one copy per lane of the frame and adds it to the lane's open group.

        The bytes may change from now on, so this already counts as a store. The arrival is a second
        store.
        """
        access = Access(frame, instruction, addresses, 0, items.dtype.itemsize)
        at = self.shared.locate(access)
        self.shared.write(at, np.zeros_like(items))
        self.in_flight.begin(at)
        lanes = frame.all_lanes
        copy = Copy(instruction, lanes, self.groups.open(lanes), at.items, items)
        self.copies.append(copy)

    def wait(self, frame: Frame, pending: int) -> None:
        """Writes the bytes of all groups of the frame's lanes except the `pending` youngest."""
        awaited, left = self.groups.awaited(frame, pending), []
        for copy in self.copies:
            done = copy.groups <= awaited[copy.lanes]
            if done.any():
                self._arrive(frame, copy.take(done))
            if not done.all():
                left.append(copy.take(~done))
        self.copies = left

    def _arrive(self, frame: Frame, copy: Copy) -> None:
        width = copy.items.dtype.itemsize
        at = self.shared.at(issuers(frame, copy.lanes), copy.instruction, copy.targets, width)
        self.in_flight.end(at.items, width)
        self.shared.write(at, copy.items, counted=False)  # counted when the copy started


def shared_in_flight(batch: Batch) -> InFlight:
    """Returns a new record of the batch's copies in flight into shared memory."""
    return InFlight(batch.shared)


@means("cp.async.commit_group")
def commit(call: Call) -> None:
    call.batch.state(AsyncCopies).groups.commit(call.frame)


@means("cp.async.wait_group")
def wait_group(call: Call, pending: int) -> None:
    call.batch.state(AsyncCopies).wait(call.frame, pending)


@means("cp.async.wait_all")
def wait_all(call: Call) -> None:
    commit(call)
    wait_group(call, 0)


@means("cp.async")
def copy(call: Call, target: Place, source: Place, width: int, size: np.ndarray | None) -> None:
    """Starts each lane's copy of `width` bytes. `size`: bytes to read; the rest becomes zeros."""
    access = call.access_each(source, width)
    targets = call.every(target.addresses.astype(np.int64) + target.offset)
    if size is None:
        items = call.batch.memory.load(access)
    else:
        items = _load_part(call.batch.memory, access, call.every(size))
    copies = call.batch.state(AsyncCopies)
    copies.issue(call.frame, call.instruction, targets.astype(np.uint32), items)


def _load_part(memory: GlobalMemory, access: Access, sizes: np.ndarray) -> np.ndarray:
    """Loads sizes[i] bytes at each address and pads them with zeros; reads nothing for size 0."""
    width = access.width
    if (sizes > width).any():
        position = int(np.argmax(sizes > width))
        told = f"reads {int(sizes[position])} bytes to copy, of a copy of {width}"
        raise access.fault(OutOfBounds, position, told)
    data = np.zeros((access.frame.count, width), np.uint8)
    whole = np.flatnonzero(sizes == width)
    if whole.size:
        data[whole] = memory.load(access.subset(whole)).view(np.uint8).reshape(-1, width)
    for byte in range(width):
        part = np.flatnonzero((sizes > byte) & (sizes < width))
        if part.size:
            one = access.subset(part)._replace(offset=access.offset + byte, width=1)
            data[part, byte] = memory.load(one)
    return data.view(ITEMS[width]).reshape(-1)
