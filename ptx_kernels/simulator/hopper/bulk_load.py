"""`cp.async.bulk` from global to shared memory: long copies whose bytes an mbarrier counts. PTX ISA
9.1, 9.7.9.25.4.

The bytes arrive as late as they may: when no thread of the batch can go on without them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...ptx.instructions import Version
from ...ptx.types import TYPES
from ..access import Access, Located
from ..batch import Batch
from ..frame import Frame
from ..races.concurrency import AsyncWriter
from ..races.vector_clock import VectorClock
from ..steps.async_copy import shared_in_flight
from ..steps.loads_stores import address_of
from ..steps.operands import Operands
from ..steps.registry import compiles
from ..steps.step import Step
from ..text.program import Instruction
from .chunks import CHUNK, in_chunks
from .mbarrier import Mbarriers
from .proxy import check_start

_NEEDS: Version = ((8, 0), 90)
_OPCODES = tuple(
    f"cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes"
    for space in ("shared::cluster", "shared::cta")
)
_COPY = AsyncWriter("a bulk copy", "a wait for its mbarrier")


@dataclass
class BulkLoad:
    """Copies of one instruction, one chunk per lane of the frame.

    Attributes:
      items: what arrives.
      barriers: place of the mbarrier that counts each chunk.
    """

    at: Located
    items: np.ndarray
    barriers: np.ndarray


class BulkLoads:
    """The copies into a batch's shared memory that have not arrived."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.in_flight = batch.state(shared_in_flight)
        self.loads: list[BulkLoad] = []
        batch.deliveries.append(self.deliver)

    def issue(self, access: Access, items: np.ndarray, barriers: np.ndarray) -> None:
        """Starts one chunk per lane: from now on the bytes may change."""
        shared = self.batch.shared
        at = shared.locate(access)
        check_start(shared, "write", at)
        self.in_flight.begin(at)
        self.loads.append(BulkLoad(at, items, barriers))

    def deliver(self, awaited: set[int]) -> None:
        """Lets the bytes arrive that these mbarriers count, in random order if perturbed."""
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
        batch.shared.shadow.write_async(batch.order, at.items, at.width, load.barriers, _COPY)
        batch.shared.scatter(at, load.items)
        now = np.array([batch.order.tick()])
        for place, chunks in zip(*np.unique(load.barriers, return_counts=True), strict=True):
            batch.state(Mbarriers).change(
                at.frame,
                at.instruction,
                int(np.argmax(load.barriers == place)),
                int(place),
                arrived=int(chunks) * CHUNK,
                released=VectorClock({~int(place): now}),
            )


@compiles(*_OPCODES)
def compile_bulk_load(operands: Operands, instruction: Instruction) -> Step:
    opcode = instruction.opcode.removesuffix(".L2::cache_hint")
    operands.spelled(instruction, *_OPCODES, *(f"{o}.L2::cache_hint" for o in _OPCODES))
    operands.needs(instruction, _NEEDS)
    operands.count(instruction, 5 if opcode != instruction.opcode else 4)
    target, source, size, barrier, *_ = instruction.operands
    to, to_offset = address_of(operands, instruction, target, "shared")
    origin, offset = address_of(operands, instruction, source, "global")
    sizes, _ = operands.source(size, TYPES["u32"], instruction)
    counter, counter_offset = address_of(operands, instruction, barrier, "shared")

    def run(batch: Batch, frame: Frame) -> None:
        fetched = (frame.fetch(slot, instruction) for slot in (to, origin, sizes, counter))
        targets, sources, nbytes, counters = (np.broadcast_to(v, frame.count) for v in fetched)
        lanes, steps = in_chunks(frame, instruction, nbytes)  # a lane may come several times
        known = batch.state(Mbarriers)
        barriers = known.places(frame, counters, counter_offset)
        for position, at in enumerate(barriers):
            known.find(frame, instruction, position, int(at))
        if not lanes.size:
            return  # a copy of nothing counts nothing
        some = frame.subset(lanes)
        from_ = sources[lanes] + steps.astype(np.uint64)
        items = batch.memory.load(Access(some, instruction, from_, offset, CHUNK))
        where = (targets[lanes].astype(np.int64) + steps + to_offset).astype(np.uint32)
        access = Access(some, instruction, where, 0, CHUNK)
        batch.state(BulkLoads).issue(access, items, barriers[lanes])

    slots = (to, origin, sizes, counter)
    reads = tuple(r for slot in slots for r in operands.register_read(slot))
    return Step(run, reads, (), synchronizes=True)
