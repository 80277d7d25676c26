"""cp.async: the copied bytes, and errors for access to bytes in flight."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_kernels import simulator
from ptx_kernels.ptx import Builder, KernelError, kernel, u32

from .ptx_text import module

SHARED = ".shared .align 16 .b8 ring[2048];"
ADDRESSES = "mul.wide.u32 %rd4, %r0, 16; add.u64 %rd5, %rd0, %rd4;"
START = "mov.u32 %r9, ring; shl.b32 %r4, %r2, 4; add.u32 %r9, %r9, %r4;" + ADDRESSES
COPY = "cp.async.cg.shared.global [%r9], [%rd5], 16;"
COMMIT = "cp.async.commit_group;"
WAIT = "cp.async.wait_group 0;"
BARRIER = "bar.sync 0;"
LOAD = "ld.shared.v4.u32 {%r5, %r6, %r7, %r8}, [%r9];"
#: like LOAD, but loads the bytes that thread 63 - %r2 copied
LOAD_OTHER = (
    "xor.b32 %r10, %r4, 1008; mov.u32 %r11, ring; add.u32 %r10, %r10, %r11; "
    "ld.shared.u32 %r5, [%r10];"
)


def launch(body: str, threads: int = 64, x: np.ndarray | None = None) -> None:
    x = np.arange(4 * threads, dtype=np.uint32) if x is None else x
    simulator.launch(module(f"{START}\n{body}\nret;", "x", outside=SHARED), [x], (1,), (threads,))


@pytest.mark.parametrize("width", [4, 8, 16])
@pytest.mark.parametrize("partial", [False, True])
def test_bytes_arrive(width: int, partial: bool) -> None:
    """Two stages; the second is in flight while the first is read.

    partial: copies use byte counts of every size.
    """

    def through(k: Builder) -> None:
        k.launch((2,), 64)
        words = width // 4
        x, y = k.input("x", u32, (2, 128, words)), k.output("y", u32, (2, 128, words))
        ring = k.shared("ring", u32, (2, 64, words), dynamic=True)
        thread = k.block_id() * 64 + k.thread_id
        for stage in range(2):
            size = k.thread_id % (width + 1) if partial else None
            k.cp_async(ring.at(stage, k.thread_id), x.at(stage, thread), width, size=size)
            k.cp_async_commit()
        for stage in range(2):
            k.cp_async_wait(1 - stage)
            k.barrier()
            for i in range(words):
                y.at(stage, thread ^ 63, i).store(0, ring.at(stage, k.thread_id ^ 63, i).load())

    x = np.random.default_rng(0).integers(0, 1 << 32, (2, 128, width // 4), np.uint32)
    built = kernel(through)()
    assert built.dynamic_shared_bytes == 2 * 64 * width
    (y,) = simulator.run(built, x)
    want = x.copy().view(np.uint8)
    if partial:
        want[:, np.arange(width) >= (np.arange(128) % 64 % (width + 1))[:, None]] = 0
    np.testing.assert_array_equal(y.view(np.uint8), want)


def test_a_size_of_zero_reads_nothing() -> None:
    launch(
        "mov.u32 %r5, 0; cp.async.cg.shared.global [%r9], [%rd5+65536], 16, %r5;"
        + COMMIT
        + WAIT
        + LOAD
    )


@pytest.mark.parametrize(
    "body",
    [
        COPY + COMMIT + WAIT + LOAD,  # a thread's own bytes need no barrier
        COPY + "cp.async.wait_all;" + BARRIER + LOAD_OTHER,
        COPY
        + COMMIT
        + "cp.async.ca.shared.global [%r9+1024], [%rd5], 16;"
        + COMMIT
        + "cp.async.wait_group 1;"
        + LOAD,
        COPY + COMMIT,  # in flight at the end
    ],
)
def test_right_orders(body: str) -> None:
    launch(body)


@pytest.mark.parametrize(
    ("error", "body", "message"),
    [
        (
            simulator.AsyncPending,
            COPY + COMMIT + LOAD,
            r"ring\+0: reads 16 bytes that the copy of line 12.*thread 0",
        ),
        (simulator.AsyncPending, COPY + WAIT + LOAD, "reads 16 bytes"),  # never committed
        (
            simulator.AsyncPending,
            COPY + COMMIT + BARRIER + LOAD_OTHER,
            "reads 4 bytes.*issued by thread 63",
        ),
        (
            simulator.AsyncPending,
            COPY + COMMIT + COPY + COMMIT + "cp.async.wait_group 1;" + LOAD,
            "writes 16 bytes",
        ),
        (simulator.AsyncPending, COPY + COMMIT + "st.shared.u8 [%r9+5], %r0;", "writes 1 bytes"),
        (simulator.AsyncPending, COPY + COMMIT + "cp.async.wait_group 1;" + LOAD, "reads 16 bytes"),
        (simulator.SharedRace, COPY + COMMIT + WAIT + LOAD_OTHER, "without a barrier between"),
        (
            simulator.SharedRace,
            COPY + COMMIT + BARRIER + WAIT + LOAD_OTHER,
            "without a barrier between",
        ),
        (
            simulator.SharedRace,
            "st.shared.u32 [%r9], %r0;" + BARRIER + LOAD_OTHER + COPY + COMMIT,
            "writes.*without a barrier between",
        ),
        (
            simulator.OutOfBounds,
            COPY.replace("%rd5", "%rd5+16"),
            "offset 1024 of x, which has 1024 bytes",
        ),
        (simulator.OutOfBounds, COPY.replace("%r9", "%r9+1040"), "shared offset 2048"),
        (
            simulator.Misaligned,
            "add.u64 %rd5, %rd0, 4; setp.eq.u32 %p0, %r2, 0; @%p0 " + COPY,
            "no multiple of 16",
        ),
        (
            simulator.Misaligned,
            COPY.replace("%r9", "%r9+8"),
            "shared offset 8 is no multiple of 16",
        ),
        (
            simulator.OutOfBounds,
            "mov.u32 %r5, 17; cp.async.cg.shared.global [%r9], [%rd5], 16, %r5;",
            "reads 17 bytes to copy, of a copy of 16",
        ),
        (simulator.ParseError, COPY.replace("16;", "8;"), "copies 16 bytes"),
        (
            simulator.ParseError,
            "cp.async.ca.shared.global [%r9], [%rd5], 12;",
            "copies 4 or 8 or 16 bytes",
        ),
        (simulator.ParseError, "cp.async.wait_group %r1;", "number of groups"),
        (
            simulator.UnknownInstruction,
            "cp.async.cx.shared.global [%r9], [%rd5], 16;",
            "no known instruction",
        ),
    ],
)
def test_bad_copies_are_refused(
    error: type[simulator.SimulationError], body: str, message: str
) -> None:
    with pytest.raises(error, match=f"(?s){message}.*line"):
        launch(body)


def test_the_builder_refuses() -> None:
    def wrong(k: Builder) -> None:
        k.launch((1,), 32)
        k.cp_async(k.shared("s", u32, (32,)), k.input("x", u32, (32,)), 12)

    with pytest.raises(KernelError, match="4, 8 or 16 bytes from global to shared memory, not 12"):
        kernel(wrong)()
