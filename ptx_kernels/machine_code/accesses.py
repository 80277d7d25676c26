"""Counts a launch's accesses to shared memory, L1 and L2 per thread block, in the simulator.

A few thread blocks of the grid, or one cluster, run on operands of zeros: addresses depend on
lengths, tables and ids, but not on values. A kernel with a long loop runs at two small lengths and
the counts are extrapolated, because all trips do the same. Loads from a peer's shared memory count
as wavefronts of the loading thread block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import numpy as np

from ..kernels import FAMILIES
from ..kernels.family import RandomValues
from ..kernels.pages import PAGE_BUFFERS
from ..ptx import Buffer, Kernel, u8
from ..simulator import DeviceBuffer, Traffic, launch
from ..simulator.access import Located
from ..simulator.layout import WARP
from ..simulator.traffic import wavefronts

_SECTOR = 32  # bytes
_BLOCKS = 3  # blocks to run if they differ: joined matrices can have different formats
_SHIFT = 44  # bits for an item or a sector; the number of a warp or block is above them

_INTEGERS: dict[str, RandomValues] = {
    name: values for family in FAMILIES.values() for name, values in family.operands.items()
}


@dataclass(frozen=True)
class Accesses:
    """Memory accesses per thread block, averaged over the thread blocks that ran.

    Attributes:
      wavefronts: of shared memory and L1 together, which serve one per clock.
      shared, shared_least: wavefronts of shared memory alone, and their minimum without bank
        conflicts.
      l2_bytes: bytes of the sectors that the thread block touches, each once; L1 serves repeated
        reads.
      memory_bytes: the part of `l2_bytes` that comes from HBM: packed weights, pages, states.
      memory_loads: bytes that the thread block's lanes load from HBM, counted per lane.
      memory_distinct: like `memory_loads`, without bytes that another lane of the warp loads at the
        same time.
      sector_requests: sectors of HBM that the loads of warps ask L1 for, each once per load.
      warp_sectors: like `sector_requests`, each once per warp.
    """

    wavefronts: float
    shared: float
    shared_least: float
    l2_bytes: float
    memory_bytes: float
    memory_loads: float
    memory_distinct: float
    sector_requests: float
    warp_sectors: float

    @property
    def sector_excess(self) -> float:
        """Ratio of requested sectors to a warp's distinct ones.

        At 1, no load leaves part of a sector to a later one, which finds it in L1 if L1 keeps it.
        """
        return self.sector_requests / self.warp_sectors if self.warp_sectors else 1.0

    @property
    def distinct(self) -> float:
        """Fraction of the bytes loaded from HBM that are distinct within a warp."""
        return self.memory_distinct / self.memory_loads if self.memory_loads else 1.0

    @property
    def shared_excess(self) -> float:
        """Ratio of shared memory wavefronts to the minimum; 1 means no bank conflicts."""
        return self.shared / self.shared_least if self.shared_least else 1.0


def in_memory(buffer: Buffer, kernel: Kernel) -> bool:
    """Returns whether a launch reads the buffer from HBM: weights, pages and states.

    No cache holds these since their last use. Activations are in L2 from the launch before.
    """
    family = FAMILIES.get(kernel.family)
    if family and buffer.name in family.rewritten:
        return True
    return (
        buffer.role == "in"
        and not buffer.ahead
        and (buffer.type is u8 or buffer.name in PAGE_BUFFERS)
    )


@functools.lru_cache(maxsize=1024)
def accesses(kernel: Kernel) -> Accesses:
    """Returns the accesses per thread block of `kernel`, counted in the simulator."""
    family = FAMILIES.get(kernel.family)
    shorter = family.shorter(kernel.arguments) if family else None
    if family and shorter and kernel.arguments[shorter[0]] > 2 * shorter[1]:
        name, least = shorter
        counts = [
            np.array(astuple(_run(family.build(**{**kernel.arguments, name: length}))))
            for length in (least, 2 * least)
        ]
        more = kernel.arguments[name] / least - 2
        return Accesses(*(counts[1] + more * (counts[1] - counts[0])).tolist())
    return _run(kernel)


@dataclass
class _Counted(Traffic):
    """Traffic counts with the additional counts that `Accesses` needs.

    `memory`: buffers in HBM.
    """

    memory: Sequence[DeviceBuffer] = ()
    wavefronts: int = 0
    loads: int = 0
    distinct: int = 0
    sectors: list[np.ndarray] = field(default_factory=list)
    memory_sectors: list[np.ndarray] = field(default_factory=list)
    requests: list[np.ndarray] = field(default_factory=list)

    def count_shared(self, at: Located) -> None:
        super().count_shared(at)
        self.wavefronts += wavefronts(at)[0]

    def count_global(self, at: Located) -> None:
        super().count_global(at)
        copied = at.instruction.opcode.startswith("cp.async")  # bypasses L1, into shared memory
        self.wavefronts += 0 if copied else wavefronts(at)[0]
        blocks = at.frame.of_lanes(at.frame.layout.block_of_lane)
        sector = (at.items * at.width + at.origin % (1 << _SHIFT)) // _SECTOR
        sectors = np.unique(blocks << _SHIFT | sector)
        self.sectors.append(sectors)
        if any(buffer.base == at.origin for buffer in self.memory):
            self.memory_sectors.append(sectors)
            if at.instruction.opcode.startswith("ld."):
                warps = at.frame.all_lanes // WARP
                self.loads += at.items.size * at.width
                self.distinct += np.unique(warps << _SHIFT | at.items).size * at.width
                self.requests.append(np.unique(warps << _SHIFT | sector))


def _run(kernel: Kernel) -> Accesses:
    total = int(np.prod(kernel.grid))
    family = FAMILIES.get(kernel.family)
    packed = family.weights(kernel.arguments) if family and family.weights else None
    together = math.prod(kernel.cluster)
    alike = together > 1 or (packed and len(set(packed.formats)) == 1)
    count = 1 if alike else min(_BLOCKS, total)
    only = [(2 * i + 1) * total // (2 * count) for i in range(count)]
    buffers = {b.name: _operand(b, kernel) for b in kernel.buffers}
    memory = [buffers[b.name] for b in kernel.buffers if in_memory(b, kernel)]
    found = _Counted(memory=memory)
    launch(
        kernel.text,
        [buffers[b.name] for b in (*kernel.operands, *kernel.results)],
        kernel.grid,
        kernel.block,
        kernel.dynamic_shared_bytes,
        traffic=found,
        only=only,
    )
    shared = found.shared.values()
    counts = (
        found.wavefronts,
        sum(c.moved for c in shared),
        sum(c.least for c in shared),
        _SECTOR * _distinct(found.sectors),
        _SECTOR * _distinct(found.memory_sectors),
        found.loads,
        found.distinct,
        sum(each.size for each in found.requests),
        _distinct(found.requests),
    )
    return Accesses(*(each / (count * together) for each in counts))


def _distinct(sectors: Sequence[np.ndarray]) -> int:
    return np.unique(np.concatenate(sectors)).size if sectors else 0


def _operand(buffer: Buffer, kernel: Kernel) -> DeviceBuffer:
    """Returns a buffer of zeros, which take no memory until they are written.

    Integer buffers get values by their name.
    """
    array = np.zeros(buffer.shape, buffer.type.dtype)
    buffers = {b.name: b for b in kernel.buffers}
    rows = next((b.shape[0] for b in kernel.buffers if b.type is u8), 0)
    if buffer.name == "ids" and rows:  # ids of the selected rows or matrices
        array[...] = np.arange(array.size).reshape(array.shape) % rows
    elif buffer.role != "out" and buffer.type.name == "s32" and buffer.name in _INTEGERS:
        array[...] = _INTEGERS[buffer.name](buffer, buffers, np.random.default_rng(0))
        if buffer.name in ("context_lens", "lengths"):
            array[...] = array.max()  # every sequence is full
    return DeviceBuffer(buffer.name, array, buffer.role)
