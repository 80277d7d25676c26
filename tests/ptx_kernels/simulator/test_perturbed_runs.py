"""Each choice of a perturbed run, shown by a kernel whose results depend on it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ptx_kernels import simulator
from ptx_kernels.ptx.instructions import INSTRUCTIONS

from .ptx_text import apply, module, per_thread

SEEDS = range(12)
TICKET = "atom.global.add.u32 %r3, [%rd0], 1; mul.wide.u32 %rd4, %r0, 4; add.u64 %rd5, %rd1, %rd4;"


def under(seed: int, run: Callable[[], np.ndarray]) -> np.ndarray:
    with simulator.perturbation(seed):
        return run()


def tickets(grid: int, block: int) -> np.ndarray:
    """The order in which threads reached the counter, shape (grid, block)."""
    counter, y = np.zeros(1, np.uint32), np.zeros(grid * block, np.uint32)
    text = module(f"{TICKET} st.global.b32 [%rd5], %r3; ret;", "a, y")
    simulator.launch(text, [counter, y], (grid,), (block,))
    assert sorted(y) == list(range(grid * block))
    return y.reshape(grid, block)


def test_order_of_atomics_warps_and_blocks() -> None:
    lanes = {tuple(under(seed, lambda: tickets(1, 32)).ravel()) for seed in SEEDS}
    assert len(lanes) == len(SEEDS)
    by_warp = [under(seed, lambda: tickets(1, 128)).reshape(4, 32).max(axis=1) for seed in SEEDS]
    # each of four warps finished first in some run
    assert {int(np.argmin(last)) for last in by_warp} == {
        0,
        1,
        2,
        3,
    }
    first = {int(np.argmin(under(seed, lambda: tickets(3, 32)).min(axis=1))) for seed in SEEDS}
    assert first == {0, 1, 2}
    np.testing.assert_array_equal(tickets(3, 32).ravel(), range(96))


def test_a_warp_may_run_ahead_of_others() -> None:
    """Each thread takes a second ticket; one warp's may precede another's first."""
    body = "atom.shared.add.u32 {}, [t], 1;"
    start = (
        ".shared .b32 t; setp.eq.u32 %p0, %r2, 0; mov.b32 %r6, 0; "
        "@%p0 st.shared.b32 [t], %r6; bar.sync 0;"
    )

    def taken(which: str) -> np.ndarray:
        return per_thread(
            f"{start} {body.format('%r3')} {body.format('%r4')}", which, threads=128
        ).reshape(4, 32)

    assert (taken("%r4") >= 128).all()
    ahead = [under(seed, lambda: taken("%r4")).min() < 128 for seed in SEEDS]
    assert any(ahead) and not all(ahead)  # sometimes all run together


def test_blocks_run_in_batches_of_several_sizes() -> None:
    def batches() -> int:
        return simulator.launch(module("ret;", "y"), [np.zeros(1, np.uint32)], (12,), (32,)).batches

    with_seeds = set()
    for seed in SEEDS:
        with simulator.perturbation(seed):
            with_seeds.add(batches())
    assert batches() == 1 and with_seeds == {1, 2, 3}


def test_shared_memory_in_whatever_order() -> None:
    """Warps that wait for each other at barriers in a loop still do."""
    body = (
        ".shared .b32 t[128]; mov.u32 %r3, t; mad.lo.u32 %r4, %r2, 4, %r3; "
        "xor.b32 %r5, %r4, 128; mov.b32 %r6, 0;"
        "mov.b32 %r7, %r2;\nTOP:\nst.shared.b32 [%r4], %r7; bar.sync 0; "
        "ld.shared.b32 %r7, [%r5]; bar.sync 0;"
        "add.u32 %r7, %r7, 1; add.u32 %r6, %r6, 1; setp.lt.u32 %p0, %r6, 3;\n@%p0 bra TOP;"
    )
    want = (np.arange(128) ^ 32) + 3
    for seed in SEEDS:
        np.testing.assert_array_equal(
            under(seed, lambda: per_thread(body, "%r7", threads=128)), want
        )


def test_which_lane_wins() -> None:
    def winner() -> np.ndarray:
        y = np.zeros(1, np.uint32)
        simulator.launch(module("st.global.b32 [%rd0], %r2; ret;", "y"), [y], (1,), (32,))
        return y

    assert winner()[0] == 31
    assert len({int(under(seed, winner)[0]) for seed in SEEDS}) > 5


@pytest.mark.parametrize(
    "opcode", [o for o, row in INSTRUCTIONS.items() if row.error and len(row.operands) == 1]
)
def test_approximate_results_move_within_their_error(opcode: str) -> None:
    bound = INSTRUCTIONS[opcode].error
    assert bound is not None
    x, special = (
        np.linspace(0.1, 6, 64, dtype=np.float32),
        np.tile(np.float32([0.0, -0.0, np.inf, np.nan]), 8),
    )
    exact = apply(opcode, "f f", x).astype(np.float64)
    runs = [under(seed, lambda: apply(opcode, "f f", x)) for seed in SEEDS]
    ulp = np.spacing(np.abs(exact).astype(np.float32))
    room = (
        np.maximum.reduce(
            [bound.ulps * ulp, bound.relative * np.abs(exact), np.full(64, bound.absolute)]
        )
        + ulp / 2
    )
    for seed, got in enumerate(runs):
        assert (np.abs(got - exact) <= room).all() and (got != exact).any()
        np.testing.assert_array_equal(
            under(seed, lambda: apply(opcode, "f f", special)), apply(opcode, "f f", special)
        )
    # one function for all lanes of a launch, and for all launches with a seed
    alone = f"mov.b32 %f2, {int(x[7].view(np.uint32))}; {opcode} %f3, %f2; mov.b32 %r3, %f3;"
    assert (under(0, lambda: per_thread(alone, "%r3").view(np.float32)) == runs[0][7]).all()


@pytest.mark.parametrize(
    ("body", "contracts"),
    [
        ("mul.f32 %f4, %f2, %f3; add.f32 %f5, %f4, %f1;", True),
        ("mul.f32 %f4, %f2, %f3; add.f32 %f5, %f1, %f4;", True),
        ("mul.ftz.f32 %f4, %f2, %f3; add.ftz.f32 %f5, %f1, %f4;", True),
        ("mul.f32 %f4, %f2, %f3; setp.eq.u32 %p0, %r2, %r2; @%p0 add.f32 %f5, %f4, %f1;", True),
        ("mul.rn.f32 %f4, %f2, %f3; add.rn.f32 %f5, %f4, %f1;", False),
        ("mul.rn.f32 %f4, %f2, %f3; add.f32 %f5, %f4, %f1;", False),
        # the product itself is used
        (
            "mul.f32 %f4, %f2, %f3; add.f32 %f5, %f4, %f1; mov.f32 %f6, %f4;",
            False,
        ),
        # a factor is overwritten
        (
            "mul.f32 %f4, %f2, %f3; mov.f32 %f3, %f1; add.f32 %f5, %f4, %f1;",
            False,
        ),
        # the product is overwritten
        (
            "mul.f32 %f4, %f2, %f3; sub.f32 %f4, %f4, %f4; add.f32 %f5, %f4, 0f00000000;",
            False,
        ),
        ("mul.f32 %f4, %f2, %f3; mov.f32 %f4, 0f3F801000; add.f32 %f5, %f4, %f1;", False),
        # only for some lanes
        (
            "setp.eq.u32 %p0, %r2, %r2; @%p0 mul.f32 %f4, %f2, %f3; add.f32 %f5, %f4, %f1;",
            False,
        ),
        # the product is both addends
        (
            "mul.f32 %f4, %f2, %f3; add.f32 %f5, %f4, %f4; sub.f32 %f5, %f5, %f5;",
            False,
        ),
        # another basic block
        (
            "mul.f32 %f4, %f2, %f3; bra NEXT;\nNEXT:\nadd.f32 %f5, %f4, %f1;",
            False,
        ),
    ],
)
def test_contraction_of_what_states_no_rounding(body: str, contracts: bool) -> None:
    """(1 + 2^-12)^2 - (1 + 2^-11) is 2^-24 if fused, else 0."""
    start = "mov.f32 %f2, 0f3F800800; mov.f32 %f3, 0f3F800800; mov.f32 %f1, 0fBF801000;"

    def run() -> np.ndarray:
        return per_thread(f"{start} {body} mov.b32 %r3, %f5;", "%r3").view(np.float32)

    assert (run() == 0).all()
    seen = {float(under(seed, run)[0]) for seed in SEEDS}
    assert seen == ({0.0, 2.0**-24} if contracts else {0.0})


def test_the_context_ends_also_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), simulator.perturbation(1), simulator.perturbation(2):
        raise ZeroDivisionError
    np.testing.assert_array_equal(tickets(1, 64).ravel(), range(64))
