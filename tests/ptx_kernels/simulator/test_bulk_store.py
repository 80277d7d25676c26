"""Bulk copies from shared to global memory: stored bytes, and requirements before and after."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_kernels import simulator
from ptx_kernels.machine_code.ptxas import assemble
from ptx_kernels.simulator import AsyncPending, MissingProxyFence, SharedRace, SimulationError

from .ptx_text import module

START = """
  mov.u32 %r7, words; mad.lo.u32 %r5, %r2, 4, %r7; setp.eq.u32 %p0, %r2, 0; mov.u32 %r8, %ctaid.x;
  mul.wide.u32 %rd4, %r8, 256; add.u64 %rd5, %rd0, %rd4; mul.wide.u32 %rd4, %r2, 4;
  add.u64 %rd6, %rd5, %rd4;
  xor.b32 %r9, %r0, 0x55;
"""
STORE = "st.shared.u32 [%r5], %r9;\n"
FENCE = "fence.proxy.async.shared::cta;\n"
BARRIER = "bar.sync 0;\n"
COPY = "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd5], [words], 256;\n"
COMMIT = "@%p0 cp.async.bulk.commit_group;\n"
READ = "@%p0 cp.async.bulk.wait_group.read 0;\n"
DONE = "@%p0 cp.async.bulk.wait_group 0;\n"
FILLED = STORE + FENCE + BARRIER
LOAD = "ld.global.u32 %r10, [%rd6];\n"


def text_of(body: str) -> str:
    shared = ".shared .align 16 .b8 words[256];"
    return module(START + body + "ret;", "y", version="8.0", target=90, outside=shared)


def launch(body: str) -> np.ndarray:
    y = np.zeros(128, np.uint32)
    simulator.launch(text_of(body), [y], (2,), (64,))
    return y


@pytest.mark.parametrize(
    "body",
    [
        FILLED + COPY + COMMIT + READ,
        FILLED + COPY + COMMIT + DONE,
        STORE + BARRIER + FENCE + COPY + COMMIT + READ,
        FILLED + COPY + COMMIT + READ + BARRIER + STORE,
        FILLED + COPY + COMMIT + DONE + BARRIER + LOAD,
        FILLED + COPY + COMMIT + READ + "@%p0 st.shared.u32 [words+128], %r2;\n" + DONE,
    ],
)
def test_words_are_copied(body: str) -> None:
    want = np.arange(128, dtype=np.uint32) ^ 0x55
    np.testing.assert_array_equal(launch(body), want)
    for seed in range(4):
        with simulator.perturbation(seed):
            np.testing.assert_array_equal(launch(body), want)
    assert assemble(text_of(body), "sm_90").spill_store_bytes == 0


def test_groups_arrive_in_order() -> None:
    """A thread can wait for the older of two groups only."""
    half = (
        "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd5+{0}], [words+{0}], 128;\n" + COMMIT
    )
    body = (
        FILLED
        + half.format(0)
        + half.format(128)
        + "@%p0 cp.async.bulk.wait_group.read {};\n{}"
        + DONE
    )
    first, second = (f"@%p0 st.shared.u32 [words+{at}], %r2;\n" for at in (124, 128))
    launch(body.format(1, first))
    launch(body.format(0, second))
    with pytest.raises(
        AsyncPending,
        match=r"words\+128: writes 4 bytes that the copy of line \d+ may not have read",
    ):
        launch(body.format(1, second))


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (
            STORE + BARRIER + COPY + COMMIT + READ,
            MissingProxyFence,
            "this copy reads what thread 0 wrote, without a f",
        ),
        (
            FENCE + STORE + BARRIER + COPY + COMMIT + READ,
            MissingProxyFence,
            "without a fence.proxy.async between",
        ),
        (
            STORE + "@%p0 " + FENCE + BARRIER + COPY + COMMIT + READ,
            MissingProxyFence,
            "what thread 1 wrote, without",
        ),
        (STORE + FENCE + COPY + COMMIT + READ, SharedRace, "lane 0 reads what lane 1 wrote"),
        (
            FENCE + COPY + COMMIT + READ,
            simulator.UninitializedRead,
            "nobody wrote all of these 16 bytes",
        ),
        (
            FILLED + COPY + COMMIT,
            AsyncPending,
            "the block ends before this copy has read its shared memory",
        ),
        (FILLED + COPY + READ, AsyncPending, "the block ends before this copy"),
        (
            FILLED + COPY + COMMIT + STORE + READ,
            AsyncPending,
            r"words\+0: writes 4 bytes that the copy of line",
        ),
        (
            FILLED + COPY + COMMIT + BARRIER + STORE + READ,
            AsyncPending,
            r"words\+0: writes 4 bytes that the copy",
        ),
        (
            FILLED + COPY + COMMIT + READ + STORE,
            SharedRace,
            "lane 1 writes what a copy of lane 0 read",
        ),
        (
            FILLED + COPY + COMMIT + READ + BARRIER + LOAD,
            AsyncPending,
            "offset 0 of y: touches 4 bytes that the copy",
        ),
        (
            FILLED + COPY + COMMIT + DONE + LOAD,
            simulator.GlobalRace,
            "lane 1 reads what lane 0 wrote",
        ),
        (
            FILLED + COPY + COPY,
            AsyncPending,
            "offset 0 of y: touches 16 bytes that the copy of line",
        ),
        (
            FILLED + COPY.replace("256;", "24;"),
            simulator.Misaligned,
            "copies 24 bytes, which is no multiple of 16",
        ),
        (FILLED + COPY.replace("256;", "272;"), simulator.OutOfBounds, "shared offset 256"),
        (
            FILLED + COPY.replace("[%rd5]", "[%rd0+8]"),
            simulator.Misaligned,
            "offset 8 of y, is no multiple of 16",
        ),
        ("cp.async.bulk.wait_all;", simulator.UnknownInstruction, "no known instruction"),
    ],
)
def test_bad_copies_are_refused(body: str, error: type[SimulationError], message: str) -> None:
    with pytest.raises(error, match=f"(?s){message}.*line "):
        launch(body)
