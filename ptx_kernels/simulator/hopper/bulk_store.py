"""Simulates `cp.async.bulk` from shared to global memory (PTX ISA 9.1, 9.7.9.25.4).

A thread's copies form groups, and the thread waits for a group. A copy may read its source at any
time between its start and the thread's wait for its group with `.read`. Nobody may write the bytes
in between, and earlier writes must be followed by a proxy fence. The stored bytes may be read after
a wait without `.read`. Proxy fences are checked for shared memory only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..access import Access, Located
from ..batch import Batch
from ..errors import AsyncPending
from ..frame import Frame
from ..steps.async_copy import Groups, issuers
from ..steps.binding import Call, Place
from ..steps.meaning import means
from ..text.program import Instruction
from .chunks import CHUNK, in_chunks
from .proxy import check_start


@dataclass
class BulkStore:
    """Bulk copies of one instruction whose groups have not all been waited for.

    The arrays have one entry per chunk.

    Attributes:
      groups: group number, counted per lane.
      sources: items of the batch's shared memory.
      targets: global address, u64.
      read: whether the lane has waited with `.read`.
    """

    instruction: Instruction
    lanes: np.ndarray
    groups: np.ndarray
    sources: np.ndarray
    targets: np.ndarray
    items: np.ndarray
    read: np.ndarray

    def take(self, where: np.ndarray) -> BulkStore:
        arrays = (self.lanes, self.groups, self.sources, self.targets, self.items, self.read)
        return BulkStore(self.instruction, *(x[where] for x in arrays))


class BulkStores:
    """Bulk copies out of a batch's shared memory that are in flight."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.groups = Groups(batch.layout.lanes)
        self.stores: list[BulkStore] = []
        batch.shared.guards.append(self._check_source)
        batch.memory.guards.append(self._check_target)
        batch.at_end.append(self._finish)

    def issue(
        self, frame: Frame, instruction: Instruction, sources: np.ndarray, targets: np.ndarray
    ) -> None:
        """Starts one chunk per lane of the frame; a lane may occur several times."""
        lanes, shared = frame.all_lanes, self.batch.shared
        at = shared.locate(Access(frame, instruction, sources, 0, CHUNK))
        check_start(shared, "fetch", at)
        items = shared.views[CHUNK].take(at.items)
        self.batch.memory.store(Access(frame, instruction, targets, 0, CHUNK), items)
        groups, unread = self.groups.open(lanes), np.zeros(lanes.size, np.bool_)
        copy = BulkStore(instruction, lanes, groups, at.items, targets, items, unread)
        self.stores.append(copy)

    def wait(self, frame: Frame, pending: int, read_only: bool) -> None:
        """Waits for all groups of the frame's lanes except the `pending` youngest.

        With `read_only`, these copies have then read their sources; otherwise their bytes have also
        arrived.
        """
        awaited = self.groups.awaited(frame, pending)
        copies, self.stores = self.stores, []
        for copy in copies:
            done = copy.groups <= awaited[copy.lanes]
            self._end_fetch(frame, copy.take(done & ~copy.read))
            copy.read |= done
            if read_only:
                self.stores.append(copy)
                continue
            some = copy.take(done)
            if some.lanes.size:
                waiting = issuers(frame, some.lanes)
                access = Access(waiting, some.instruction, some.targets, 0, CHUNK)
                self.batch.memory.store(access, some.items)
            if not done.all():
                self.stores.append(copy.take(~done))

    def _end_fetch(self, frame: Frame, copy: BulkStore) -> None:
        """Records at the wait that the copy has read its source: later writes come after it."""
        if copy.lanes.size:
            shared = self.batch.shared
            at = shared.at(issuers(frame, copy.lanes), copy.instruction, copy.sources, CHUNK)
            shared.shadow.access(self.batch.happens_before, "fetch", at)

    def _check_source(self, at: Located, what: str) -> None:
        """Raises if a write to shared memory meets bytes that a copy may not have read yet."""
        if what == "reads":
            return
        for copy in self.stores:
            self._check(at, copy, copy.sources[~copy.read] * CHUNK, what, "read")

    def _check_target(self, at: Located, what: str) -> None:
        """Raises if an access to global memory meets copied bytes that may not have arrived yet."""
        for copy in self.stores:
            # far away if they belong to another buffer
            starts = (copy.targets - np.uint64(at.origin)).astype(np.int64)
            self._check(at, copy, starts, what, "stored")

    def _check(
        self, at: Located, copy: BulkStore, starts: np.ndarray, what: str, done: str
    ) -> None:
        width, first = at.width, at.items[:, None] * at.width
        meets = (first < starts + CHUNK) & (first + width > starts)
        if meets.any():
            told = (
                f"{what} {width} bytes that the copy of line {copy.instruction.line} "
                f"may not have {done} yet: its thread has not waited for its group"
            )
            raise at.fault(AsyncPending, int(np.argmax(meets.any(axis=1))), told)

    def _finish(self) -> None:
        """Checks, when all threads have exited, that no copy still reads their shared memory."""
        for copy in self.stores:
            if not copy.read.all():
                lane = int(copy.lanes[np.argmin(copy.read)])
                told = (
                    "the block ends before this copy has read its shared memory: "
                    "no wait for its group with .read"
                )
                raise self.batch.layout.fault(AsyncPending, copy.instruction, lane, told)


@means("cp.async.bulk.global", synchronizes=True)
def store(
    call: Call,
    target: Place,
    source: Place,
    size: np.ndarray,
    policy: np.ndarray | None = None,
) -> None:
    """Starts each lane's bulk copy. `policy` is a cache hint and is ignored."""
    lanes, steps = in_chunks(call, call.every(size))
    if not lanes.size:
        return
    sources = call.every(source.addresses).astype(np.int64)[lanes] + steps + source.offset
    targets = call.every(target.addresses)[lanes] + (steps + target.offset).astype(np.uint64)
    some, stores = call.frame.subset(lanes), call.batch.state(BulkStores)
    stores.issue(some, call.instruction, sources.astype(np.uint32), targets)


@means("cp.async.bulk.commit_group", synchronizes=True)
def commit(call: Call) -> None:
    call.batch.state(BulkStores).groups.commit(call.frame)


@means("cp.async.bulk.wait_group", synchronizes=True)
def wait_group(call: Call, pending: int) -> None:
    call.batch.state(BulkStores).wait(call.frame, pending, bool(call.words["read"]))
