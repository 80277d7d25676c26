"""mbarriers and the bulk copies that they count: ordering and errors."""

from __future__ import annotations

import numpy as np
import pytest
from support.tensor_kernels import STEPS, WORDS, pipeline

from ptx_kernels import simulator
from ptx_kernels.machine_code.ptxas import assemble
from ptx_kernels.ptx import Builder, KernelError, kernel, u32, u64

from .ptx_text import module


def test_a_pipeline_of_two_warps() -> None:
    x = np.arange(2 * STEPS * WORDS, dtype=np.uint32).reshape(2, STEPS, WORDS)
    (y,) = simulator.run(pipeline(), x)
    np.testing.assert_array_equal(y, x + 1)
    for seed in range(5):
        with simulator.perturbation(seed):
            np.testing.assert_array_equal(simulator.run(pipeline(), x)[0], y)
    assert assemble(pipeline().text, "sm_90").spill_store_bytes == 0


@pytest.mark.parametrize(
    ("opcode", "which", "error", "message"),
    [
        (
            "mbarrier.try_wait",
            0,
            simulator.MbarrierMisuse,
            "full.0: 1 arrivals, of which phase 0 expects 0 more",
        ),
        ("mbarrier.try_wait", 1, simulator.AsyncPending, "ring.0: reads 4 bytes that the copy"),
        (
            "mbarrier.arrive.shared",
            0,
            simulator.Deadlock,
            "waits for a phase of shared empty.0 that nobody completes",
        ),
        (
            "mbarrier.arrive.expect_tx",
            0,
            simulator.Deadlock,
            "waits for a phase of shared .*0 that nobody completes",
        ),
        (
            "cp.async.bulk",
            0,
            simulator.Deadlock,
            "waits for a phase of shared .*0 that nobody completes",
        ),
        ("bar.sync", 0, simulator.SharedRace, "warp 1 updates by an atomic what warp 0 wrote"),
    ],
)
def test_a_pipeline_that_lacks_an_instruction(opcode: str, which: int, error, message: str) -> None:
    lines = pipeline().text.split("\n")
    at = [i for i, line in enumerate(lines) if line.strip().startswith(opcode)][which]
    done = lines[at].split()[1]  # the wait's result
    lines[at] = f"setp.eq.u32 {done} 0, 0;" if "wait" in opcode else ""
    x = np.zeros((2, STEPS, WORDS), np.uint32)
    with pytest.raises(error, match=f"(?s){message}"):
        simulator.launch("\n".join(lines), [x, np.zeros_like(x)], (2,), (64,))


SHARED = ".shared .align 16 .b8 object[8]; .shared .align 16 .b8 ring[256];"
INIT = "setp.eq.u32 %p1, %r2, 0; @%p1 mbarrier.init.shared.b64 [object], {}; bar.sync 0;\n"
COPY = (
    "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [ring], [%rd0], "
    "{}, [object];\n"
)
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [object], {};\n"
TEST = "mbarrier.test_wait.parity.shared.b64 %p2, [object], 0;\n"
STORE = (
    "selp.b32 %r5, 1, 0, %p2; mul.wide.u32 %rd4, %r0, 4; add.u64 %rd5, %rd1, %rd4; "
    "st.global.u32 [%rd5], %r5;\n"
)


def launch(body: str, *, version: str = "8.0", target: int = 90) -> np.ndarray:
    x, y = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    text = module(body + "\nret;", "x, y", version=version, target=target, outside=SHARED)
    simulator.launch(text, [x, y], (1,), (64,))
    return y


def test_a_test_may_fail() -> None:
    """Nobody arrives: test_wait fails, and the thread continues."""
    assert not launch(INIT.format(1) + TEST + STORE).any()


def test_states_name_phases() -> None:
    """64 arrivals complete the phase whose state each thread holds."""
    arrive = "mbarrier.arrive.shared.b64 %rd6, [object];\n"
    wait = "again: mbarrier.try_wait.shared.b64 %p2, [object], %rd6; @!%p2 bra again;\n"
    assert launch(INIT.format(64) + arrive + wait + STORE).all()


def test_an_object_is_made_anew() -> None:
    again = (
        "@%p1 mbarrier.inval.shared.b64 [object]; @%p1 mbarrier.init.shared.b64 [object], 1; "
        "bar.sync 0;\n"
    )
    arrive = "@%p1 mbarrier.arrive.shared.b64 _, [object], 1;\n"
    assert launch(INIT.format(5) + again + arrive + TEST + STORE).all()


@pytest.mark.parametrize(
    ("error", "body", "message"),
    [
        (
            simulator.UninitializedRead,
            "mbarrier.arrive.shared.b64 _, [object];",
            "object.0: nobody wrote",
        ),
        (
            simulator.MbarrierMisuse,
            "@%p1 st.shared.u64 [object], %rd0;" + EXPECT.format(16),
            "no mbarrier.init made",
        ),
        (simulator.MbarrierMisuse, INIT.format(0), "cannot expect 0"),
        (
            simulator.MbarrierMisuse,
            INIT.format(1) + "@%p1 mbarrier.init.shared.b64 [object], 1;",
            "is one already",
        ),
        (
            simulator.MbarrierMisuse,
            INIT.format(2) + EXPECT.format(16) + "@%p1 mbarrier.arrive.shared.b64 _, [object], 2;",
            "2 arrivals, of which phase 0 expects 1 more",
        ),
        (
            simulator.Misaligned,
            INIT.format(1) + COPY.format(24),
            "copies 24 bytes, which is no multiple of 16",
        ),
        (
            simulator.Misaligned,
            INIT.format(1) + "add.u64 %rd0, %rd0, 8;" + COPY.format(32),
            "is no multiple of 16 bytes",
        ),
        (simulator.OutOfBounds, INIT.format(1) + COPY.format(272), "offset 256 of x"),
        (
            simulator.MbarrierMisuse,
            "setp.eq.u32 %p1, %r2, 0;" + COPY.format(16),
            "no mbarrier.init made this",
        ),
        (
            simulator.AsyncPending,  # the waiting thread may read, its neighbors may not
            INIT.format(1) + EXPECT.format(16) + COPY.format(16) + "@!%p1 bra over;\n"
            "again: mbarrier.try_wait.parity.shared.b64 %p2, [object], 0; @!%p2 bra again; "
            "ld.shared.u32 %r5, [ring];\n"
            "over: ld.shared.u32 %r6, [ring];",
            "ring.0: reads 4 bytes.*thread .1, 0, 0.",
        ),
        (
            simulator.UnknownInstruction,
            "mbarrier.pending_count.b64 %r5, %rd6;",
            "no known instruction",
        ),
        (
            simulator.UnknownInstruction,
            COPY.format(16).replace("global", "shared"),
            "no known instruction",
        ),
    ],
)
def test_bad_operations_are_refused(
    error: type[simulator.SimulationError], body: str, message: str
) -> None:
    prefix = "" if "setp" in body else "setp.eq.u32 %p1, %r2, 0;\n"
    with pytest.raises(error, match=f"(?s){message}"):
        launch(prefix + body)


@pytest.mark.parametrize(
    ("body", "version", "target", "needed"),
    [
        (EXPECT.format(16), "7.8", 90, "8.0 and sm_90"),
        ("mbarrier.arrive.shared.b64 _, [object];", "7.0", 80, "7.1 and sm_80"),
        ("mbarrier.arrive.shared.b64 %rd6, [object], 2;", "7.8", 80, "7.8 and sm_90"),
    ],
)
def test_an_older_target_is_refused(body: str, version: str, target: int, needed: str) -> None:
    with pytest.raises(simulator.ParseError, match=f"needs PTX {needed}"):
        launch(INIT.format(1) + body, version=version, target=target)


def test_arrivals_assemble_for_the_target_they_declare() -> None:
    @kernel
    def arrive(k: Builder) -> None:
        k.launch((1,), 32)
        y, barrier = k.output("y", u32, (32,)), k.shared("barrier", u64, (1,))
        k.mbarrier_init(barrier, 32)
        k.mbarrier_arrive(barrier)
        y.store(k.thread_id, k.thread_id)

    assert ".target sm_80" in arrive().text
    assert assemble(arrive().text, "sm_80").spill_store_bytes == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda k, x, s: k.mbarrier_init(s, 1), "an mbarrier is a u64 in shared memory, not a u32"),
        (
            lambda k, x, s: k.bulk_copy(x, s, 16, s.cast(u64)),
            "from global to shared memory, not from shared to global",
        ),
        (lambda k, x, s: k.bulk_copy(s, x, 24, s.cast(u64)), "bulk_copy of 24 bytes"),
    ],
)
def test_the_builder_refuses(call, message: str) -> None:
    def wrong(k: Builder) -> None:
        k.launch((1,), 32)
        call(k, k.input("x", u32, (32,)), k.shared("s", u32, (32,)))

    with pytest.raises(KernelError, match=message):
        kernel(wrong)()
