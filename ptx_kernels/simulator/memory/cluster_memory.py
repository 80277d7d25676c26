"""Shared memory of a cluster: accesses by lanes to their own and to other thread blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..access import Access, Located
from ..address_space import CLUSTER_BIT
from ..errors import AbsentBlock, OutOfBounds
from ..layout import Layout
from ..races.happens_before import HappensBefore
from ..text.program import Instruction
from .shared_memory import SharedMemory

_INSIDE = (1 << CLUSTER_BIT) - 1


@dataclass(frozen=True)
class _Visit:
    """Last access to a thread block's shared memory by a lane of another thread block."""

    time: np.uint64
    lane: int
    instruction: Instruction


class ClusterMemory:
    """Loads and stores at addresses from `mapa`, or at the thread block's own shared addresses.

    Another thread block is known to exist only between two barriers of the cluster that all its
    threads reach (PTX ISA 9.1, 5.1.6; CUDA C++ Programming Guide, "Distributed Shared Memory").
    Traffic is counted for the thread block that makes the access.
    """

    def __init__(self, shared: SharedMemory, layout: Layout, happens_before: HappensBefore) -> None:
        self.shared, self.layout, self.happens_before = shared, layout, happens_before
        self._visits: dict[int, _Visit] = {}  # block of the batch -> last access by another block

    def load(self, access: Access) -> np.ndarray:
        """Returns one item per lane, shape (lanes of the frame,)."""
        return self.shared.read(self._locate(access))

    def store(self, access: Access, values: np.ndarray) -> None:
        """Stores items, shape (lanes of the frame,) or (1,)."""
        self.shared.write(self._locate(access), values)

    def map(self, access: Access, ranks: np.ndarray) -> np.ndarray:
        """Returns the addresses of the same offsets in the thread blocks of these ranks."""
        beyond = np.flatnonzero(ranks >= self.layout.cluster_size)
        if beyond.size:
            at = int(beyond[0])
            told = f"rank {int(ranks[at])} of a cluster of {self.layout.cluster_size} blocks"
            raise access.fault(OutOfBounds, at, told)
        return (access.addresses & np.uint32(_INSIDE)) | ranks + np.uint32(1) << CLUSTER_BIT

    def _locate(self, access: Access) -> Located:
        frame, size = access.frame, self.layout.cluster_size
        addresses = np.broadcast_to(access.addresses, frame.count).astype(np.int64)
        windows = addresses >> CLUSTER_BIT
        if (windows > size).any():
            position = int(np.argmax(windows > size))
            told = f"address {int(addresses[position]):#x} lies in no block of the cluster"
            raise access.fault(OutOfBounds, position, told)
        own = np.broadcast_to(frame.of_lanes(self.layout.block_of_lane), frame.count)
        blocks = np.where(windows == 0, own, own // size * size + windows - 1)
        inside = access._replace(addresses=addresses & _INSIDE)
        at = self.shared.locate(inside, blocks)
        others = np.flatnonzero(blocks != own)
        if others.size:
            self._visit(at, others, blocks)
        return at

    def _visit(self, at: Located, positions: np.ndarray, blocks: np.ndarray) -> None:
        """Records accesses to other thread blocks; raises if one of them may not have started."""
        happens_before, lanes = self.happens_before, at.frame.all_lanes
        early = happens_before.clustered[lanes[positions]] <= happens_before.start
        if early.any():
            position = int(positions[np.argmax(early)])
            whose = self.layout.block_name(int(self.layout.numbers[blocks[position]]))
            told = f"{whose} may not have started: no barrier of the cluster came before"
            raise at.fault(AbsentBlock, position, told)
        now = happens_before.stamps()[0]
        for block in np.unique(blocks[positions]):
            lane = int(lanes[positions[np.argmax(blocks[positions] == block)]])
            self._visits[int(block)] = _Visit(now, lane, at.instruction)

    def check_exits(self) -> None:
        """Raises if a thread block may have exited before others accessed its shared memory."""
        for block, visit in self._visits.items():
            of_block = self.layout.block_of_lane == block
            if visit.time >= self.happens_before.clustered[of_block].max():
                whose = self.layout.block_name(int(self.layout.numbers[block]))
                told = (
                    f"shared memory of {whose}, which may have exited: no barrier of the cluster "
                    "comes after"
                )
                raise self.layout.fault(AbsentBlock, visit.instruction, visit.lane, told)
