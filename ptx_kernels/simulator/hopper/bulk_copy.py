"""`cp.async.bulk`: long copies from global to shared memory whose bytes an mbarrier counts. PTX ISA
9.1, 9.7.9.25.4.

The bytes arrive as late as they may: when no thread of the batch can go on without them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...ptx.instructions import Version
from ...ptx.types import TYPES
from ..frame import Frame
from ..races.vector_clock import Clock
from ..steps.async_copy import Copy, compile_async_copy, copies_of
from ..steps.loads_stores import address_of
from ..steps.operands import Operands, Step
from ..text.program import Instruction
from .bulk_store import CHUNK, compile_bulk_store, in_chunks
from .mbarrier import mbarriers, places

_NEEDS: Version = ((8, 0), 90)
_OPCODES = tuple(
    f"cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes"
    for space in ("shared::cluster", "shared::cta")
)


@dataclass
class BulkCopy:
    """Copies of one instruction; `barriers`: per chunk of 16 bytes, the mbarrier that counts it."""

    copy: Copy
    barriers: np.ndarray


def compile_copy(operands: Operands, instruction: Instruction) -> Step:
    """Every instruction that starts with `cp`."""
    if not instruction.opcode.startswith("cp.async.bulk."):
        return compile_async_copy(operands, instruction)
    opcode = instruction.opcode.removesuffix(".L2::cache_hint")
    if opcode not in _OPCODES:
        return compile_bulk_store(operands, instruction)
    operands.needs(instruction, _NEEDS)
    operands.count(instruction, 5 if opcode != instruction.opcode else 4)
    target, source, size, barrier, *_ = instruction.operands
    to, to_offset = address_of(operands, instruction, target, "shared")
    origin, offset = address_of(operands, instruction, source, "global")
    sizes, _ = operands.source(size, TYPES["u32"], instruction)
    counter, counter_offset = address_of(operands, instruction, barrier, "shared")

    def run(frame: Frame) -> None:
        fetched = (frame.fetch(slot, instruction) for slot in (to, origin, sizes, counter))
        targets, sources, nbytes, counters = (np.broadcast_to(v, frame.count) for v in fetched)
        lanes, steps = in_chunks(frame, instruction, nbytes)  # a lane may come several times
        barriers = places(frame, counters, counter_offset)
        for position, at in enumerate(barriers):
            mbarriers(frame).find(frame, instruction, position, int(at))
        if not lanes.size:
            return  # a copy of nothing counts nothing
        some = frame.subset(lanes)
        loaded = frame.batch.memory.load(
            some, instruction, sources[lanes] + steps.astype(np.uint64), offset, CHUNK, False
        )
        where = (targets[lanes].astype(np.int64) + steps + to_offset).astype(np.uint32)
        frame.batch.shared.start_copy(some, instruction, where, CHUNK)
        copies = copies_of(frame)
        copies.bulk.append(
            BulkCopy(copies.begin(some, instruction, where, loaded), barriers[lanes])
        )

    slots = (to, origin, sizes, counter)
    return Step(run, tuple(r for slot in slots for r in operands.register_read(slot)), ())


def complete(root: Frame, awaited: set[int]) -> None:
    """Lets the bytes arrive that the awaited mbarriers count, in random order if the run is
    perturbed.
    """
    batch = root.batch
    copies = batch.shared.copies
    if copies is None:
        return
    due = [bulk for bulk in copies.bulk if not awaited.isdisjoint(bulk.barriers.tolist())]
    copies.bulk = [bulk for bulk in copies.bulk if not any(bulk is other for other in due)]
    if batch.perturbation is not None:
        due = [due[i] for i in batch.perturbation.permutation(len(due))]
    for bulk in due:
        frame = root.subset(bulk.copy.lanes)
        copy = bulk.copy
        copies.end(frame, copy)
        batch.shared.end_copy(frame, copy.instruction, copy.addresses, copy.items, bulk.barriers)
        now = np.array([batch.order.tick()])
        for at, chunks in zip(*np.unique(bulk.barriers, return_counts=True), strict=True):
            position, landed = int(np.argmax(bulk.barriers == at)), Clock({~int(at): now}, {})
            mbarriers(root).change(
                frame,
                copy.instruction,
                position,
                int(at),
                arrived=int(chunks) * CHUNK,
                released=landed,
            )
