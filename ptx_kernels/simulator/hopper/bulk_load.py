"""Simulates `cp.async.bulk` from global to shared memory, which signals an mbarrier.

PTX ISA 9.1, 9.7.9.25.4 defines the instruction. The bytes arrive as late as they may: when no
thread of the batch can continue without them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..access import Access, Located
from ..batch import Batch
from ..races.concurrency import AsyncWriter
from ..races.vector_clock import VectorClock
from ..steps.async_copy import shared_in_flight
from ..steps.binding import Call, Place
from ..steps.meaning import means
from .chunks import CHUNK, in_chunks
from .mbarrier import Mbarriers, places_of
from .proxy import check_start

_COPY = AsyncWriter("a bulk copy", "a wait for its mbarrier")


@dataclass
class BulkLoad:
    """Bulk copies of one instruction in flight, one chunk per lane of the frame.

    Attributes:
      items: the bytes that arrive.
      barriers: index of the mbarrier that counts each chunk.
    """

    at: Located
    items: np.ndarray
    barriers: np.ndarray


class BulkLoads:
    """Bulk copies into a batch's shared memory that have not arrived."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.in_flight = batch.state(shared_in_flight)
        self.loads: list[BulkLoad] = []
        batch.deliveries.append(self.deliver)

    def issue(self, access: Access, items: np.ndarray, barriers: np.ndarray) -> None:
        """Starts one chunk per lane; from now on the target bytes may change."""
        shared = self.batch.shared
        at = shared.locate(access)
        check_start(shared, "write", at)
        self.in_flight.begin(at)
        self.loads.append(BulkLoad(at, items, barriers))

    def deliver(self, awaited: set[int]) -> None:
        """Writes the bytes that the mbarriers `awaited` count, in random order if perturbed."""
        due = [load for load in self.loads if not awaited.isdisjoint(load.barriers.tolist())]
        self.loads = [load for load in self.loads if not any(load is other for other in due)]
        generator = self.batch.freedom.generator
        if generator is not None:
            due = [due[i] for i in generator.permutation(len(due))]
        for load in due:
            self._arrive(load)

    def _arrive(self, load: BulkLoad) -> None:
        batch, at = self.batch, load.at
        self.in_flight.end(at.items, at.width)
        batch.shared.shadow.write_async(
            batch.happens_before, at.items, at.width, load.barriers, _COPY
        )
        batch.shared.scatter(at, load.items)
        now = np.array([batch.happens_before.tick()])
        for place, chunks in zip(*np.unique(load.barriers, return_counts=True), strict=True):
            batch.state(Mbarriers).change(
                at.frame,
                at.instruction,
                int(np.argmax(load.barriers == place)),
                int(place),
                arrived=int(chunks) * CHUNK,
                released=VectorClock({~int(place): now}),
            )


@means(
    "cp.async.bulk.shared::cluster.global", "cp.async.bulk.shared::cta.global", synchronizes=True
)
def load(
    call: Call,
    target: Place,
    source: Place,
    size: np.ndarray,
    barrier: Place,
    policy: np.ndarray | None = None,
) -> None:
    """Starts each lane's bulk copy. `policy` is a cache hint and is ignored."""
    lanes, steps = in_chunks(call, call.every(size))  # a lane may occur several times
    known, barriers = call.batch.state(Mbarriers), np.array(places_of(call, barrier))
    for position, at in enumerate(barriers.tolist()):
        known.find(call.frame, call.instruction, position, at)
    if not lanes.size:
        return  # an empty copy adds nothing to the mbarrier's count
    some = call.frame.subset(lanes)
    sources = call.every(source.addresses)[lanes] + steps.astype(np.uint64)
    items = call.batch.memory.load(Access(some, call.instruction, sources, source.offset, CHUNK))
    targets = call.every(target.addresses).astype(np.int64)[lanes] + steps + target.offset
    access = Access(some, call.instruction, targets.astype(np.uint32), 0, CHUNK)
    call.batch.state(BulkLoads).issue(access, items, barriers[lanes])
