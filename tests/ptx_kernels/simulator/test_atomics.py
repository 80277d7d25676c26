"""atom and red: meanings, the order of lanes, races with plain accesses."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ptx_kernels import simulator
from ptx_kernels.ptx import Builder, KernelError, f32, kernel, s32, u16, u32
from ptx_kernels.simulator import GlobalRace, SharedRace

from .ptx_text import module, per_thread

EXTREMES = [0, 5, 2**31, 2**32 - 1]


def one(opcode: str, start: int, *operands: int) -> tuple[int, int]:
    """Returns (old value, new value) of a 32-bit word updated by one lane."""
    y = np.array([start, 0], np.uint32)
    values = ", ".join(f"{v:#x}" for v in operands)
    body = (
        f"setp.eq.u32 %p0, %r2, 0; @%p0 atom.{opcode} %r3, [%rd0], {values}; "
        "@%p0 st.global.b32 [%rd0+4], %r3;"
    )
    text = module(f"{body} ret;", "y")
    simulator.launch(text, [y], (1,), (32,))
    return int(y[1]), int(y[0])


def signed(x: int) -> int:
    return x - (x >> 31 << 32)


@pytest.mark.parametrize(
    ("opcode", "meaning"),
    [
        ("global.add.u32", lambda a, b: a + b),
        ("global.add.s32", lambda a, b: a + b),
        ("global.min.u32", min),
        ("global.max.u32", max),
        ("global.min.s32", lambda a, b: min(a, b, key=signed)),
        ("global.max.s32", lambda a, b: max(a, b, key=signed)),
        ("global.and.b32", lambda a, b: a & b),
        ("global.or.b32", lambda a, b: a | b),
        ("global.xor.b32", lambda a, b: a ^ b),
        ("global.exch.b32", lambda a, b: b),
        ("global.inc.u32", lambda a, b: 0 if a >= b else a + 1),
        ("global.dec.u32", lambda a, b: b if a == 0 or a > b else a - 1),
        ("relaxed.gpu.global.add.u32", lambda a, b: a + b),
        ("acq_rel.sys.add.u32", lambda a, b: a + b),
    ],
)
def test_meanings(opcode: str, meaning) -> None:
    for a in EXTREMES:
        for b in EXTREMES:
            assert one(opcode, a, b) == (a, meaning(a, b) % 2**32), (a, b)


def test_compare_and_swap() -> None:
    assert one("global.cas.b32", 7, 7, 9) == (7, 9)
    assert one("global.cas.b32", 7, 8, 9) == (7, 7)


def test_64_bits() -> None:
    y = np.array([2**63 + 5], np.uint64)
    text = module(
        "mov.b64 %rd5, 3; red.global.add.u64 [%rd0], %rd5; red.global.max.s64 [%rd0], %rd5; ret;",
        "y",
    )
    simulator.launch(text, [y], (1,), (32,))
    assert y[0] == 3  # 2^63 + 5 + 96 is negative


def test_float_sums_flush_subnormals_in_global_memory_only() -> None:
    tiny = np.float32(1e-40)
    y = np.array([tiny], np.float32)
    bits = f"0f{tiny.view(np.uint32):08X}"
    simulator.launch(module(f"red.global.add.f32 [%rd0], {bits}; ret;", "y"), [y], (1,), (1,))
    assert y[0] == 0
    shared = (
        f".shared .b32 t; mov.f32 %f1, {bits}; setp.eq.u32 %p0, %r2, 0; "
        "@%p0 st.shared.f32 [t], %f1; bar.sync 0;"
        f"atom.shared.add.f32 %f2, [t], {bits}; bar.sync 0; ld.shared.b32 %r4, [t];"
    )
    got = per_thread(shared, "%r4")
    assert (got.view(np.float32) == np.cumsum(np.full(33, tiny), dtype=np.float32)[-1]).all()


def test_lanes_that_meet_are_served_in_order() -> None:
    """Each lane sees the updates of lower lanes at its address."""
    found = per_thread(
        ".shared .b32 t[2]; shl.b32 %r3, %r2, 2; setp.lt.u32 %p0, %r2, 2; mov.b32 %r6, 0; "
        "mov.u32 %r5, t;"
        "add.u32 %r3, %r3, %r5; @%p0 st.shared.b32 [%r3], %r6; bar.sync 0; and.b32 %r3, %r2, 1; "
        "shl.b32 %r3, %r3, 2;"
        "add.u32 %r3, %r3, %r5; atom.shared.add.u32 %r4, [%r3], %r2;",
        "%r4",
        threads=64,
    )
    lanes = np.arange(64)
    np.testing.assert_array_equal(
        found, [lanes[(lanes < i) & (lanes % 2 == i % 2)].sum() for i in lanes]
    )


def test_blocks_share_a_counter() -> None:
    y = np.zeros(256, np.uint32)
    text = module(
        "mul.wide.u32 %rd3, %r2, 4; add.u64 %rd4, %rd0, %rd3; red.add.u32 [%rd4], %r2; ret;", "y"
    )
    simulator.launch(text, [y], (9,), (256,), batch_lanes=512)
    np.testing.assert_array_equal(y, 9 * np.arange(256))


def test_two_buffers_at_once() -> None:
    a, b = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    text = module(
        "and.b32 %r3, %r2, 1; setp.eq.u32 %p0, %r3, 0; selp.b64 %rd3, %rd0, %rd1, %p0;"
        "red.global.add.u32 [%rd3], %r2; ret;",
        "a, b",
    )
    simulator.launch(text, [a, b], (1,), (32,))
    assert (a[0], b[0]) == (240, 256)


@pytest.mark.parametrize(
    ("body", "error", "what"),
    [
        (
            "red.global.add.u32 [%rd0], 1; bar.sync 0; ld.global.u32 %r3, [%rd0];",
            GlobalRace,
            "updated by an atomic",
        ),
        (
            "ld.global.u32 %r3, [%rd0]; red.global.add.u32 [%rd0], 1;",
            GlobalRace,
            "updates by an atomic what several",
        ),
        (
            ".shared .b32 t; setp.eq.u32 %p0, %r2, 0; mov.b32 %r3, 0; @%p0 st.shared.b32 [t], %r3;"
            "red.shared.add.u32 [t], 1;",
            SharedRace,
            "shared t+0: lane 1 updates by an atomic what lane 0 wrote",
        ),
        (
            ".shared .b32 t[32]; mov.u32 %r4, t; mad.lo.u32 %r3, %r2, 4, %r4;"
            "cp.async.ca.shared.global [%r3], [%rd0], 4; red.shared.add.u32 [%r3], 1;",
            simulator.AsyncPending,
            "shared t+0: updates 4 bytes that the copy of line 11",
        ),
        (
            ".shared .b32 t; red.shared.add.u32 [t], 1;",
            simulator.UninitializedRead,
            "nobody wrote all of these 4",
        ),
        ("red.global.add.u32 [%rd0+2], 1;", simulator.Misaligned, "offset 2 of y"),
        ("red.global.add.u32 [%rd0+8], 1;", simulator.OutOfBounds, "offset 8 of y"),
        ("red.global.exch.b32 [%rd0], 1;", simulator.UnknownInstruction, "no known instruction"),
        ("red.global.add.b32 [%rd0], 1;", simulator.UnknownInstruction, "no known instruction"),
        ("atom.global.add.u32 [%rd0], 1;", simulator.ParseError, "takes 3 operands, got 2"),
        ("membar.gpu;", simulator.UnknownInstruction, "no known instruction"),
    ],
)
def test_refused(body: str, error: type[simulator.SimulationError], what: str) -> None:
    with pytest.raises(error, match=re.escape(what)):
        simulator.launch(module(f"{body} ret;", "y"), [np.zeros(2, np.uint32)], (2,), (32,))


def test_inputs_and_unwritten_outputs_are_refused() -> None:
    text = module("red.global.add.u32 [%rd0], 1; membar.gl; fence.acq_rel.gpu; ret;", "y")
    with pytest.raises(simulator.ReadOnlyWrite, match="store to y"):
        simulator.launch(
            text, [simulator.DeviceBuffer("y", np.zeros(1, np.uint32), "in")], (1,), (32,)
        )
    fresh = simulator.DeviceBuffer("y", np.zeros(1, np.uint32), "out", initialized=False)
    with pytest.raises(simulator.UninitializedRead, match="never all written"):
        simulator.launch(text, [fresh], (1,), (32,))


@kernel
def histogram(k: Builder, *, n: int) -> None:
    """Counts x's values 0 to 7, and computes their sum and maximum."""
    x = k.input("x", u32, (n,))
    counts, total = k.inout("counts", u32, (8,)), k.inout("total", f32, (1,))
    highest, ticket = k.inout("highest", s32, (1,)), k.inout("ticket", u32, (1,))
    k.launch((-(-n // 64),), 64)
    thread = k.block_id() * 64 + k.thread_id
    inside = thread < n
    value = x.load(thread, where=inside)
    counts.at(value).atomic_add(0, 1, where=inside)
    total.atomic_add(0, value.to(f32))
    highest.atomic_max(0, value.bits(s32))
    ticket.atomic_cas(0, 7, thread)


def test_in_the_kernel_language() -> None:
    x = np.random.default_rng(0).integers(0, 8, 150).astype(np.uint32)
    given = (
        np.zeros(8, np.uint32),
        np.zeros(1, np.float32),
        np.full(1, -3, np.int32),
        np.full(1, 7, np.uint32),
    )
    counts, total, highest, ticket = simulator.run(histogram(n=150), x, *given)
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=8))
    assert (total[0], highest[0], ticket[0]) == (x.sum(), x.max(), 0)


def test_types_that_atomics_lack() -> None:
    @kernel
    def wrong(k: Builder) -> None:
        k.output("y", u16, (4,)).atomic_cas(0, 1, 2)

    with pytest.raises(KernelError, match="atomic cas takes u32, s32, u64, s64, f32, not u16"):
        wrong()


@kernel
def last_warp(k: Builder, *, ordered: bool) -> None:
    """Sums 128 lanes' numbers in the warp that counts last."""
    y = k.output("y", u32, (32,))
    numbers, count = k.shared("numbers", u32, (128,)), k.shared("count", u32, (1,))
    k.launch((1,), 128)
    count.store(0, 0, where=k.thread_id == 0)
    k.barrier()
    numbers.store(k.thread_id, k.thread_id)
    k.warp_barrier()
    before = count.atomic_add(0, 1, where=k.lane_id == 0, ordered=ordered)
    with k.when(k.shuffle(before, 0) == 3):
        k.warp_barrier()
        share = sum(numbers.load(k.lane_id + 32 * i) for i in range(1, 4))
        y.store(k.lane_id, share + numbers.load(k.lane_id))


def test_an_ordered_count_shows_what_others_wrote() -> None:
    (y,) = simulator.run(last_warp(ordered=True))
    np.testing.assert_array_equal(y, 4 * np.arange(32) + 192)
    with pytest.raises(SharedRace):
        simulator.run(last_warp(ordered=False))


def test_ordered_counts_are_of_a_block() -> None:
    @kernel
    def wrong(k: Builder) -> None:
        k.output("y", u32, (4,)).atomic_add(0, 1, ordered=True)

    with pytest.raises(KernelError, match="ordered=True is for shared memory, not global"):
        wrong()
