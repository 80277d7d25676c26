"""`cp.async`: copies from global to shared memory that go on until their thread waits for them.

The bytes arrive as late as they may: at the wait of the thread that issued the copy. Until then
whoever reads or writes them is in error. Arriving counts as that thread's store at its wait, so
that other threads need a barrier after it, as they would after any store. PTX ISA 9.1, 9.7.9.25.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...ptx.instructions import Version
from ...ptx.types import TYPES
from ..access import Access
from ..batch import Batch
from ..errors import OutOfBounds, ParseError, UnknownInstruction
from ..frame import Frame
from ..memory.global_memory import GlobalMemory
from ..memory.in_flight import InFlight
from ..text.program import Immediate, Instruction
from .loads_stores import address_of
from .operands import Operands
from .registry import compiles
from .step import Step

_NEEDS: Version = ((7, 0), 80)


@dataclass
class Copy:
    """One instruction's copies that lanes have not waited for yet; arrays have an entry per lane.

    Attributes:
      groups: number of the lane's group that the copy belongs to.
      addresses: shared, u32.
      items: what arrives.
    """

    instruction: Instruction
    lanes: np.ndarray
    groups: np.ndarray
    addresses: np.ndarray
    items: np.ndarray

    def take(self, where: np.ndarray) -> Copy:
        arrays = (self.lanes, self.groups, self.addresses, self.items)
        return Copy(self.instruction, *(x[where] for x in arrays))


class AsyncCopies:
    """The copies of a batch's lanes, in groups."""

    def __init__(self, batch: Batch) -> None:
        self.shared = batch.shared
        self.in_flight = batch.state(shared_in_flight)
        self.committed = np.zeros(batch.layout.lanes, np.int64)  # groups of each lane
        self.copies: list[Copy] = []

    def issue(
        self, frame: Frame, instruction: Instruction, addresses: np.ndarray, items: np.ndarray
    ) -> None:
        """Starts one copy per lane of the frame, which is of the lane's open group.

        The bytes may change from now on, so this is a store already; the other one is when they
        arrive.
        """
        access = Access(frame, instruction, addresses, 0, items.dtype.itemsize)
        self.shared.store(access, np.zeros_like(items))
        self.in_flight.begin(self.shared.locate(access))
        lanes = frame.all_lanes
        copy = Copy(instruction, lanes, self.committed[lanes] + 1, addresses, items)
        self.copies.append(copy)

    def commit(self, frame: Frame) -> None:
        self.committed[frame.all_lanes] += 1

    def wait(self, frame: Frame, pending: int) -> None:
        """Lets all groups of the frame's lanes arrive except for the `pending` youngest."""
        here = np.zeros(self.committed.size, np.bool_)
        here[frame.all_lanes] = True
        left = []
        for copy in self.copies:
            done = here[copy.lanes] & (copy.groups <= self.committed[copy.lanes] - pending)
            if done.any():
                self._arrive(frame, copy.take(done))
            if not done.all():
                left.append(copy.take(~done))
        self.copies = left

    def _arrive(self, frame: Frame, copy: Copy) -> None:
        issuers = frame.subset(np.searchsorted(frame.all_lanes, copy.lanes))
        width = copy.items.dtype.itemsize
        access = Access(issuers, copy.instruction, copy.addresses, 0, width)
        self.in_flight.end(self.shared.locate(access).items, width)
        self.shared.store(access, copy.items)


def shared_in_flight(batch: Batch) -> InFlight:
    """The copies in flight into a batch's shared memory: state of the batch."""
    return InFlight(batch.shared)


@compiles("cp")
def compile_async_copy(operands: Operands, instruction: Instruction) -> Step:
    operands.needs(instruction, _NEEDS)
    opcode = instruction.opcode
    if opcode == "cp.async.commit_group":
        operands.count(instruction, 0)
        return Step(_commit, (), ())
    if opcode in ("cp.async.wait_group", "cp.async.wait_all"):
        return _wait(operands, instruction)
    parts = [p for p in opcode.split(".") if not p.startswith("L2::")]
    if len(parts) != 5 or parts[2] not in ("ca", "cg") or parts[3] not in ("shared", "shared::cta"):
        raise operands.error(UnknownInstruction, instruction, f"{opcode} is no known instruction")
    if parts[:2] != ["cp", "async"] or parts[4] != "global":
        raise operands.error(UnknownInstruction, instruction, f"{opcode} is no known instruction")
    return _copy(operands, instruction, (16,) if parts[2] == "cg" else (4, 8, 16))


def _commit(batch: Batch, frame: Frame) -> None:
    batch.state(AsyncCopies).commit(frame)


def _wait(operands: Operands, instruction: Instruction) -> Step:
    if instruction.opcode.endswith("wait_all"):
        operands.count(instruction, 0)

        def wait_all(batch: Batch, frame: Frame) -> None:
            batch.state(AsyncCopies).commit(frame)
            batch.state(AsyncCopies).wait(frame, 0)

        return Step(wait_all, (), ())
    operands.count(instruction, 1)
    (number,) = instruction.operands
    if not isinstance(number, Immediate) or not isinstance(number.value, int) or number.value < 0:
        raise operands.error(ParseError, instruction, "waits for a number of groups, an immediate")
    pending = number.value

    def wait(batch: Batch, frame: Frame) -> None:
        batch.state(AsyncCopies).wait(frame, pending)

    return Step(wait, (), ())


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

    def run(batch: Batch, frame: Frame) -> None:
        addresses = np.broadcast_to(frame.fetch(origin, instruction), frame.count)
        targets = np.broadcast_to(
            frame.fetch(to, instruction).astype(np.int64) + to_offset, frame.count
        )
        if sizes is None:
            items = batch.memory.load(Access(frame, instruction, addresses, offset, width))
        else:
            wanted = np.broadcast_to(frame.fetch(sizes, instruction), frame.count)
            access = Access(frame, instruction, addresses, offset, width)
            items = _load_part(batch.memory, access, wanted, item)
        batch.state(AsyncCopies).issue(frame, instruction, targets.astype(np.uint32), items)

    slots = (to, origin) if sizes is None else (to, origin, sizes)
    return Step(run, tuple(r for slot in slots for r in operands.register_read(slot)), ())


def _load_part(
    memory: GlobalMemory, access: Access, sizes: np.ndarray, item: np.dtype
) -> np.ndarray:
    """The first sizes[i] bytes at each address, then zeros, as items; of 0 bytes nothing is read."""
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
    return data.view(item).reshape(-1)
