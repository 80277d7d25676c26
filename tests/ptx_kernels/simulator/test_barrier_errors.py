"""Errors of warps and barriers."""

from __future__ import annotations

import numpy as np

from ptx_kernels import simulator

from .ptx_text import per_thread
from .refusals import launch, refuses


def test_barrier_in_divergent_code() -> None:
    with refuses(
        simulator.BarrierDivergence,
        "16 of the warp's 32 live threads",
        "bar.sync 0;",
        "thread (0, 0, 0)",
    ):
        launch("and.b32 %r3, %r2, 31; setp.ge.u32 %p0, %r3, 16;\n@%p0 bra END;\nbar.sync 0;\nEND:")
    with refuses(simulator.BarrierDivergence, "5 of the warp's 32 live threads"):
        launch("setp.lt.u32 %p0, %r2, 5; @%p0 bar.sync 0;")


def test_exit_before_a_barrier() -> None:
    body = "setp.lt.u32 %p0, %r2, 32;\n@%p0 ret;\nbar.sync 0;"
    with refuses(
        simulator.EarlyExit,
        "32 threads of its block exited before it",
        "bar.sync 0;",
        "thread (32, 0, 0)",
    ):
        launch(body)
    launch(body, strict=False)
    with refuses(simulator.EarlyExit, "8 threads of its block"):
        launch("setp.lt.u32 %p0, %r2, 8;\n@%p0 ret;\nbar.sync 0;")


def test_deadlock() -> None:
    with refuses(simulator.Deadlock, "64 of the block's 64 threads wait", "bar.sync 1;"):
        launch(
            "setp.lt.u32 %p0, %r2, 32;\n@%p0 bra OTHER;\nbar.sync 0;\nbra END;\nOTHER:\n"
            "bar.sync 1;\nEND:"
        )
    with refuses(simulator.Deadlock, "wait at barriers that never complete"):
        launch("bar.sync 2, 96;")


def test_endless_loop() -> None:
    with refuses(simulator.StepLimit, "step limit", "bra TOP"):
        launch("TOP:\nadd.u32 %r0, %r0, 1;\nbra TOP;", step_limit=1000)


def test_shuffles_with_absent_lanes() -> None:
    with refuses(
        simulator.ShuffleError, "membermask 0xffffffff names lanes 0xffff0000, which are elsewhere"
    ):
        launch(
            "and.b32 %r3, %r2, 31; setp.ge.u32 %p0, %r3, 16;\n@%p0 bra END;\n"
            "shfl.sync.bfly.b32 %r4, %r2, 1, 31, -1;\nEND:"
        )
    # 32 lanes of two warps
    with refuses(simulator.ShuffleError, "membermask 0xffffffff names lanes 0xffff,"):
        launch(
            "setp.lt.u32 %p0, %r2, 16;\n@%p0 bra END;\nsetp.ge.u32 %p0, %r2, 48;\n@%p0 bra END;\n"
            "shfl.sync.bfly.b32 %r4, %r2, 1, 31, -1;\nEND:"
        )
    with refuses(simulator.ShuffleError, "lane 15 reads lane 16, which does not take part"):
        launch(
            "and.b32 %r3, %r2, 31; setp.ge.u32 %p0, %r3, 16;\n@%p0 bra END;\n"
            "shfl.sync.down.b32 %r4, %r2, 1, 31, 0xffff;\nEND:"
        )
    with refuses(simulator.ShuffleError, "lane 4 reads lane 5, which has exited"):
        launch(
            "and.b32 %r3, %r2, 31; setp.ge.u32 %p0, %r3, 5;\n@%p0 ret;\n"
            "shfl.sync.bfly.b32 %r4, %r2, 1, 31, -1;"
        )
    with refuses(
        simulator.ShuffleError, "lane 8 executes this but membermask 0xff does not name it"
    ):
        launch("shfl.sync.idx.b32 %r4, %r2, 0, 31, 0xff;")


def test_missing_broadcast_after_a_reduction_shows() -> None:
    """shfl.down leaves the sum only in lane 0; other lanes must differ, like on a GPU."""
    steps = "\n".join(
        f"shfl.sync.down.b32 %r4, %r3, {m}, 31, -1; add.u32 %r3, %r3, %r4;"
        for m in (16, 8, 4, 2, 1)
    )
    got = per_thread(f"mov.b32 %r3, %r2; {steps}", "%r3")
    assert got[0] == np.arange(32).sum()
    assert (got[1:] != got[0]).all()
