"""`cp.async.bulk` from shared to global memory: a thread's copies in groups, which it waits for.
PTX ISA 9.1, 9.7.9.25.4.

A copy reads as early as it starts and as late as the thread's wait for its group with `.read`: in
between nobody may write the bytes, and they must lie behind a proxy fence. What it stores may be
looked at after a wait without `.read`. Proxy fences are checked for shared memory only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...ptx.instructions import Version
from ...ptx.types import TYPES
from ..errors import AsyncPending, Misaligned, ParseError, UnknownInstruction
from ..frame import Frame
from ..races.shadow import Access
from ..steps.loads_stores import address_of
from ..steps.operands import Operands, Step
from ..text.program import Immediate, Instruction

if TYPE_CHECKING:
    from ..batch import Batch

CHUNK = 16  # bytes; sizes and addresses are multiples of it
_NEEDS: Version = ((8, 0), 90)
_OPCODE = "cp.async.bulk.global.shared::cta.bulk_group"


@dataclass
class Outgoing:
    """One instruction's copies that somebody has not waited for yet; arrays have one entry per
    chunk.

    Attributes:
      read: whether a lane has waited with `.read`.
    """

    instruction: Instruction
    lanes: np.ndarray
    groups: np.ndarray  # of the lane
    sources: np.ndarray  # item of the batch's shared memory
    targets: np.ndarray  # global address, u64
    items: np.ndarray
    read: np.ndarray

    def take(self, where: np.ndarray) -> Outgoing:
        arrays = (self.lanes, self.groups, self.sources, self.targets, self.items, self.read)
        return Outgoing(self.instruction, *(x[where] for x in arrays))


class BulkStores:
    """The copies out of a batch's shared memory that are under way."""

    def __init__(self, lanes: int) -> None:
        self.committed = np.zeros(lanes, np.int64)  # groups of each lane
        self.under_way: list[Outgoing] = []

    def issue(
        self, frame: Frame, instruction: Instruction, sources: np.ndarray, targets: np.ndarray
    ) -> None:
        """Starts one chunk per lane of the frame, in which lanes may come several times."""
        lanes, batch = frame.all_lanes, frame.batch
        index, items = batch.shared.start_fetch(frame, instruction, sources, CHUNK)
        batch.memory.store(frame, instruction, targets, 0, CHUNK, items)
        unread = np.zeros(lanes.size, np.bool_)
        self.under_way.append(
            Outgoing(instruction, lanes, self.committed[lanes] + 1, index, targets, items, unread)
        )

    def wait(self, frame: Frame, pending: int, read_only: bool) -> None:
        """All groups of the frame's lanes except for the `pending` youngest have been read, or have
        arrived.
        """
        here = np.zeros(self.committed.size, np.bool_)
        here[frame.all_lanes] = True
        copies, self.under_way = self.under_way, []
        for copy in copies:
            done = here[copy.lanes] & (copy.groups <= self.committed[copy.lanes] - pending)
            self._end_fetch(frame, copy.take(done & ~copy.read))
            copy.read |= done
            if read_only:
                self.under_way.append(copy)
                continue
            some = copy.take(done)
            if some.lanes.size:
                batch = frame.batch
                batch.memory.store(
                    _of(frame, some), some.instruction, some.targets, 0, CHUNK, some.items
                )
            if not done.all():
                self.under_way.append(copy.take(~done))

    def _end_fetch(self, frame: Frame, copy: Outgoing) -> None:
        if copy.lanes.size:
            frame.batch.shared.end_fetch(_of(frame, copy), copy.instruction, copy.sources, CHUNK)

    def check_source(self, access: Access, what: str) -> None:
        """An error if writes to shared memory, which `what` calls so, meet bytes that a copy may
        not have read yet.
        """
        for copy in self.under_way:
            starts = copy.sources[~copy.read] * CHUNK
            self._check(access, copy, starts, what, "read")

    def check_target(self, access: Access, base: int) -> None:
        """An error if accesses to the buffer at `base` meet bytes that may not have arrived yet."""
        for copy in self.under_way:
            starts = (copy.targets - np.uint64(base)).astype(
                np.int64
            )  # far away if of another buffer
            self._check(access, copy, starts, "touches", "stored")

    def _check(
        self, access: Access, copy: Outgoing, starts: np.ndarray, what: str, done: str
    ) -> None:
        width, first = access.width, access.items[:, None] * access.width
        meets = (first < starts + CHUNK) & (first + width > starts)
        if meets.any():
            told = (
                f"{what} {width} bytes that the copy of line {copy.instruction.line} "
                f"may not have {done} yet: its thread has not waited for its group"
            )
            raise access.fault(AsyncPending, int(np.argmax(meets.any(axis=1))), told)

    def finish(self, batch: Batch) -> None:
        """The blocks end, and their shared memory with them."""
        for copy in self.under_way:
            if not copy.read.all():
                lane = int(copy.lanes[np.argmin(copy.read)])
                what = "the block ends before this copy has read its shared memory: no wait for its group with .read"
                raise batch.fault(AsyncPending, copy.instruction, lane, what)


def _of(frame: Frame, copy: Outgoing) -> Frame:
    """The lanes that issued the copies, all of the frame."""
    return frame.subset(np.searchsorted(frame.all_lanes, copy.lanes))


def bulk_stores_of(frame: Frame) -> BulkStores:
    batch = frame.batch
    if batch.bulk_stores is None:
        batch.bulk_stores = BulkStores(batch.lanes)
    return batch.bulk_stores


def compile_bulk_store(operands: Operands, instruction: Instruction) -> Step:
    """The copies, their commits and waits."""
    operands.needs(instruction, _NEEDS)
    opcode = instruction.opcode.removesuffix(".L2::cache_hint")
    if opcode == "cp.async.bulk.commit_group":
        operands.count(instruction, 0)
        return Step(_commit, (), ())
    if opcode in ("cp.async.bulk.wait_group", "cp.async.bulk.wait_group.read"):
        return _wait(operands, instruction, opcode.endswith(".read"))
    if opcode != _OPCODE:
        raise operands.error(
            UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction"
        )
    operands.count(instruction, 3 if opcode == instruction.opcode else 4)
    target, source, size, *_ = instruction.operands
    to, to_offset = address_of(operands, instruction, target, "global")
    origin, offset = address_of(operands, instruction, source, "shared")
    sizes, _ = operands.source(size, TYPES["u32"], instruction)

    def run(frame: Frame) -> None:
        targets, sources, nbytes = (
            np.broadcast_to(frame.fetch(slot, instruction), frame.count)
            for slot in (to, origin, sizes)
        )
        lanes, at = in_chunks(frame, instruction, nbytes)
        some = frame.subset(lanes)
        where = (sources[lanes].astype(np.int64) + at + offset).astype(np.uint32)
        places = targets[lanes] + (at + to_offset).astype(np.uint64)
        if lanes.size:
            bulk_stores_of(frame).issue(some, instruction, where, places)

    return Step(
        run, tuple(r for slot in (to, origin, sizes) for r in operands.register_read(slot)), ()
    )


def in_chunks(
    frame: Frame, instruction: Instruction, nbytes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Each chunk's lane, as position in the frame, and its offset in the copy of nbytes[lane]
    bytes.
    """
    if (nbytes % CHUNK).any():
        position = int(np.argmax(nbytes % CHUNK != 0))
        what = f"copies {int(nbytes[position])} bytes, which is no multiple of {CHUNK}"
        raise frame.fault(Misaligned, instruction, position, what)
    lanes = np.repeat(np.arange(frame.count), nbytes // CHUNK)
    return lanes, (np.arange(lanes.size) - np.searchsorted(lanes, lanes)) * CHUNK


def _commit(frame: Frame) -> None:
    bulk_stores_of(frame).committed[frame.all_lanes] += 1


def _wait(operands: Operands, instruction: Instruction, read_only: bool) -> Step:
    operands.count(instruction, 1)
    (number,) = instruction.operands
    if not isinstance(number, Immediate) or not isinstance(number.value, int) or number.value < 0:
        raise operands.error(ParseError, instruction, "waits for a number of groups, an immediate")
    pending = number.value
    return Step(lambda frame: bulk_stores_of(frame).wait(frame, pending, read_only), (), ())
