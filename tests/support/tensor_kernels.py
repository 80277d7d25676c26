"""Small kernels for instructions that run on whole warps and copy engines.

The tests of the simulator and those of a device use them.
"""

from __future__ import annotations

from ptx_kernels.ptx import Builder, f32, kernel, s32, u32, u64
from ptx_kernels.ptx.types import TYPES

WARPS = 3
STAGES, STEPS, WORDS = 2, 5, 64


@kernel
def product(k: Builder, *, a_type: str, b_type: str, count: int) -> None:
    """Multiplies each warp's fragments.

    A is (warps, 2 * count, 32), B (warps, count, 32), C and D are (..., 4, 32).
    """
    k.launch((1,), 32 * WARPS)
    number = f32 if a_type in ("f16", "bf16") else s32
    a = k.input("a", u32, (WARPS, 2 * count, 32))
    b = k.input("b", u32, (WARPS, count, 32))
    c = k.input("c", number, (WARPS, 4, 32))
    d = k.output("d", number, (WARPS, 4, 32))
    fragments = [
        [p.at(k.warp_id, i, k.lane_id).load() for i in range(n)]
        for p, n in ((a, 2 * count), (b, count), (c, 4))
    ]
    for i, value in enumerate(k.mma(*fragments, TYPES[a_type], TYPES[b_type])):
        d.at(k.warp_id, i, k.lane_id).store(0, value)


@kernel
def load_matrices(k: Builder, *, count: int, transpose: bool) -> None:
    """Loads matrices with rows in any order: lane 8i + r points at row r of matrix i.

    That row starts 32 - lane rows after the start of x (33, 4) u32.
    """
    k.launch((1,), 32)
    x, y = k.input("x", u32, (33, 4)), k.output("y", u32, (count, 32))
    rows = k.shared("rows", u32, (33, 4))
    for i in range(4):
        rows.at(k.lane_id, i).store(0, x.at(k.lane_id, i).load())
        with k.when(k.lane_id == 0):
            rows.at(32, i).store(0, x.at(32, i).load())
    k.barrier()
    for i, word in enumerate(k.ldmatrix(rows.at(32 - k.lane_id), count, transpose=transpose)):
        y.at(i, k.lane_id).store(0, word)


@kernel
def pipeline(k: Builder) -> None:
    """Computes y = x + 1 with one warp that copies and one that computes.

    Each stage has a full and an empty barrier.
    """
    x, y = k.input("x", u32, (2, STEPS, WORDS)), k.output("y", u32, (2, STEPS, WORDS))
    k.launch((2,), 64)
    ring = k.shared("ring", u32, (STAGES, WORDS))
    full, empty = k.shared("full", u64, (STAGES,)), k.shared("empty", u64, (STAGES,))
    with k.when(k.thread_id == 0):
        for stage in range(STAGES):
            k.mbarrier_init(full.at(stage), 1)
            k.mbarrier_init(empty.at(stage), 32)
    k.barrier()
    with k.when(k.warp_id == 0) as branch:
        with k.when(k.lane_id == 0), k.loop(0, STEPS) as step:
            stage = step % STAGES
            with k.when(step >= STAGES):
                k.mbarrier_wait(empty.at(stage), (step // STAGES - 1) & 1)
                k.fence_async()
            k.mbarrier_arrive(full.at(stage), expect=4 * WORDS)
            k.bulk_copy(ring.at(stage), x.at(k.block_id(), step), 4 * WORDS, full.at(stage))
    with branch.otherwise(), k.loop(0, STEPS) as step:
        stage = step % STAGES
        k.mbarrier_wait(full.at(stage), (step // STAGES) & 1)
        for i in range(0, WORDS, 32):
            y.at(k.block_id(), step, k.lane_id + i).store(
                0, ring.at(stage, k.lane_id + i).load() + 1
            )
        k.mbarrier_arrive(empty.at(stage))
