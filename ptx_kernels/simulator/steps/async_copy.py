"""`cp.async`: copies from global to shared memory that go on behind a thread's back until it waits
for them.

The bytes arrive as late as they may: at the wait of the thread that issued the copy. Until then
whoever reads or writes them is in error. Arriving counts as that thread's store at its wait, so
that other threads need a barrier after it, as they would after any store. PTX ISA 9.1, 9.7.9.25.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...ptx.instructions import Version
from ...ptx.types import TYPES
from ..errors import AsyncPending, OutOfBounds, ParseError, UnknownInstruction
from ..frame import Frame
from ..text.program import SHARED_BASE, Immediate, Instruction
from .loads_stores import address_of
from .operands import Operands, Step

if TYPE_CHECKING:
    from ..hopper.bulk_copy import BulkCopy
    from ..memory.shared_memory import SharedMemory

_GRANULE = 4  # bytes, the smallest copy
_NEEDS: Version = ((7, 0), 80)


@dataclass
class Copy:
    """One instruction's copies, for the lanes that have not waited for theirs yet; arrays have one
    entry per lane.
    """

    instruction: Instruction
    lanes: np.ndarray
    groups: np.ndarray  # number of the lane's group that the copy belongs to
    addresses: np.ndarray  # shared, u32
    items: np.ndarray  # what arrives

    def take(self, where: np.ndarray) -> Copy:
        return Copy(
            self.instruction,
            *(x[where] for x in (self.lanes, self.groups, self.addresses, self.items)),
        )


class AsyncCopies:
    """The copies into a batch's shared memory that are under way."""

    def __init__(self, shared: SharedMemory, lanes: int) -> None:
        self.shared = shared
        self.committed = np.zeros(lanes, np.int64)  # groups of each lane
        self.under_way: list[Copy] = []
        self.bulk: list[BulkCopy] = []
        self.writer = np.zeros(
            shared.views[1].size // _GRANULE, np.int64
        )  # PTX line of the copy under way, or 0
        self.owner = np.zeros_like(self.writer)  # its lane

    def issue(
        self, frame: Frame, instruction: Instruction, addresses: np.ndarray, items: np.ndarray
    ) -> None:
        """Starts one copy per lane of the frame, which is of the lane's open group.

        The bytes may change from now on, so this is a store already; the other one is when they
        arrive.
        """
        self.shared.store(
            frame, instruction, addresses, 0, items.dtype.itemsize, np.zeros_like(items)
        )
        self.under_way.append(self.begin(frame, instruction, addresses, items))

    def begin(
        self, frame: Frame, instruction: Instruction, addresses: np.ndarray, items: np.ndarray
    ) -> Copy:
        """From now on nobody may touch the bytes."""
        lanes = frame.all_lanes
        granules = self._granules(frame, addresses, items.dtype.itemsize)
        self.writer[granules] = instruction.line
        self.owner[granules] = lanes[:, None]
        return Copy(instruction, lanes, self.committed[lanes] + 1, addresses, items)

    def end(self, frame: Frame, copy: Copy) -> None:
        """The bytes are there; the frame's lanes are those that issued the copy."""
        self.writer[self._granules(frame, copy.addresses, copy.items.dtype.itemsize)] = 0

    def commit(self, frame: Frame) -> None:
        self.committed[frame.all_lanes] += 1

    def wait(self, frame: Frame, pending: int) -> None:
        """Lets all groups of the frame's lanes arrive except for the `pending` youngest."""
        here = np.zeros(self.committed.size, np.bool_)
        here[frame.all_lanes] = True
        left = []
        for copy in self.under_way:
            done = here[copy.lanes] & (copy.groups <= self.committed[copy.lanes] - pending)
            if done.any():
                some = copy.take(done)
                issuers = frame.subset(np.searchsorted(frame.all_lanes, some.lanes))
                self.end(issuers, some)
                width = some.items.dtype.itemsize
                self.shared.store(issuers, some.instruction, some.addresses, 0, width, some.items)
            if not done.all():
                left.append(copy.take(~done))
        self.under_way = left

    def _granules(self, frame: Frame, addresses: np.ndarray, width: int) -> np.ndarray:
        """Shape (lanes, granules of an item)."""
        starts = frame.of_lanes(frame.batch.block_of_lane) * self.shared.stride
        first = (addresses.astype(np.int64) - SHARED_BASE + starts) // _GRANULE
        return first[:, None] + np.arange(width // _GRANULE)

    def check(
        self, frame: Frame, instruction: Instruction, index: np.ndarray, width: int, what: str
    ) -> None:
        """An error if an access to items `index` (as the views of shared memory count them) meets a
        copy under way.
        """
        if not self.under_way and not self.bulk:
            return
        writers = self.writer[index * width // _GRANULE]
        for further in range(_GRANULE, width, _GRANULE):
            writers = np.maximum(writers, self.writer[(index * width + further) // _GRANULE])
        if not writers.any():
            return
        position = int(np.argmax(writers != 0))
        at = int(index[position]) * width
        granules = slice(at // _GRANULE, -(-(at + width) // _GRANULE))
        lane = int(self.owner[granules][np.argmax(self.writer[granules] != 0)])
        name = frame.batch.program.shared_name(at % self.shared.stride)
        raise frame.fault(
            AsyncPending,
            instruction,
            position,
            f"{name}: {what} {width} bytes that the copy of line {int(writers[position])}, issued by thread "
            f"{lane % frame.batch.padded}, may not have finished: nobody waited for its group, or its mbarrier",
        )


def copies_of(frame: Frame) -> AsyncCopies:
    shared = frame.batch.shared
    if shared.copies is None:
        shared.copies = AsyncCopies(shared, frame.batch.lanes)
    return shared.copies


def compile_async_copy(operands: Operands, instruction: Instruction) -> Step:
    operands.needs(instruction, _NEEDS)
    opcode = instruction.opcode
    if opcode == "cp.async.commit_group":
        operands.count(instruction, 0)
        return Step(lambda frame: copies_of(frame).commit(frame), (), ())
    if opcode in ("cp.async.wait_group", "cp.async.wait_all"):
        return _wait(operands, instruction)
    parts = [p for p in opcode.split(".") if not p.startswith("L2::")]
    if len(parts) != 5 or parts[2] not in ("ca", "cg") or parts[3] not in ("shared", "shared::cta"):
        raise operands.error(UnknownInstruction, instruction, f"{opcode} is no known instruction")
    if parts[:2] != ["cp", "async"] or parts[4] != "global":
        raise operands.error(UnknownInstruction, instruction, f"{opcode} is no known instruction")
    return _copy(operands, instruction, (16,) if parts[2] == "cg" else (4, 8, 16))


def _wait(operands: Operands, instruction: Instruction) -> Step:
    if instruction.opcode.endswith("wait_all"):
        operands.count(instruction, 0)

        def wait_all(frame: Frame) -> None:
            copies_of(frame).commit(frame)
            copies_of(frame).wait(frame, 0)

        return Step(wait_all, (), ())
    operands.count(instruction, 1)
    (number,) = instruction.operands
    if not isinstance(number, Immediate) or not isinstance(number.value, int) or number.value < 0:
        raise operands.error(ParseError, instruction, "waits for a number of groups, an immediate")
    pending = number.value
    return Step(lambda frame: copies_of(frame).wait(frame, pending), (), ())


def _copy(operands: Operands, instruction: Instruction, widths: tuple[int, ...]) -> Step:
    operands.count(instruction, 3, 4)
    target, source, size, *given = instruction.operands
    if not isinstance(size, Immediate) or size.value not in widths:
        raise operands.error(
            ParseError, instruction, f"copies {' or '.join(map(str, widths))} bytes, an immediate"
        )
    width = int(size.value)
    to, to_offset = address_of(operands, instruction, target, "shared")
    origin, offset = address_of(operands, instruction, source, "global")
    sizes = operands.source(given[0], TYPES["u32"], instruction)[0] if given else None
    item = np.dtype(np.complex128 if width == 16 else f"u{width}")

    def run(frame: Frame) -> None:
        addresses = np.broadcast_to(frame.fetch(origin, instruction), frame.count)
        targets = np.broadcast_to(
            frame.fetch(to, instruction).astype(np.int64) + to_offset, frame.count
        )
        if sizes is None:
            items = frame.batch.memory.load(frame, instruction, addresses, offset, width, False)
        else:
            wanted = np.broadcast_to(frame.fetch(sizes, instruction), frame.count)
            items = _load_part(frame, instruction, addresses, offset, wanted, item)
        copies_of(frame).issue(frame, instruction, targets.astype(np.uint32), items)

    slots = (to, origin) if sizes is None else (to, origin, sizes)
    return Step(run, tuple(r for slot in slots for r in operands.register_read(slot)), ())


def _load_part(
    frame: Frame,
    instruction: Instruction,
    addresses: np.ndarray,
    offset: int,
    sizes: np.ndarray,
    item: np.dtype,
) -> np.ndarray:
    """The first sizes[i] bytes at addresses[i], then zeros, as items; where the size is 0 nothing
    is read.
    """
    width, memory = item.itemsize, frame.batch.memory
    if (sizes > width).any():
        position = int(np.argmax(sizes > width))
        raise frame.fault(
            OutOfBounds,
            instruction,
            position,
            f"reads {int(sizes[position])} bytes to copy, of a copy of {width}",
        )
    data = np.zeros((frame.count, width), np.uint8)
    whole = np.flatnonzero(sizes == width)
    if whole.size:
        some = memory.load(frame.subset(whole), instruction, addresses[whole], offset, width, False)
        data[whole] = some.view(np.uint8).reshape(-1, width)
    for byte in range(width):
        part = np.flatnonzero((sizes > byte) & (sizes < width))
        if part.size:
            data[part, byte] = memory.load(
                frame.subset(part), instruction, addresses[part], offset + byte, 1, False
            )
    return data.view(item).reshape(-1)
