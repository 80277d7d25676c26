"""Kernels that show whether a device runs clusters, and how long their barrier takes."""

from __future__ import annotations

import numpy as np

from .ptx import Builder, kernel, u32

_THREADS = 128  # per block that waits at barriers


@kernel
def cluster_ring(k: Builder, *, blocks: int, cluster: int, turns: int) -> None:
    """Passes numbers around a cluster: each turn a block takes the next block's number, plus 1.

    y u32 (blocks, 32): the final numbers; a block starts with its own number and the lane's.
    """
    k.launch((blocks,), 32, cluster=(cluster, 1, 1))
    y, mine = k.output("y", u32, (blocks, 32)), k.shared("mine", u32, (32,))
    mine.store(k.lane_id, k.block_id() * 32 + k.lane_id)
    theirs = k.peer(mine, (k.cluster_rank + 1) % cluster)
    with k.loop(0, turns):
        k.cluster_barrier()
        taken = theirs.load(k.lane_id)
        k.cluster_barrier()
        mine.store(k.lane_id, taken + 1)
    y.at(k.block_id()).store(k.lane_id, mine.load(k.lane_id))


def ring_result(blocks: int, cluster: int, turns: int) -> np.ndarray:
    """Returns the numbers that `cluster_ring` leaves."""
    start = np.arange(blocks * 32, dtype=np.uint32).reshape(-1, cluster, 32)
    return (np.roll(start, -turns, axis=1) + np.uint32(turns)).reshape(blocks, 32)


@kernel
def cluster_barriers(k: Builder, *, blocks: int, cluster: int, turns: int) -> None:
    """Waits `turns` times at the barrier of its cluster; then y (blocks,) u32 is their numbers."""
    k.launch((blocks,), _THREADS, cluster=(cluster, 1, 1))
    y = k.output("y", u32, (blocks,))
    with k.loop(0, turns, unroll=False):
        k.cluster_barrier()
    y.store(k.block_id(), k.block_id(), where=k.thread_id == 0)
