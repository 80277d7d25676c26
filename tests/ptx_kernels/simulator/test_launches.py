"""Launches: batches, operands and results."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_kernels import simulator
from ptx_kernels.ptx import Buffer, Kernel, f32
from ptx_kernels.ptx.types import bf16

from .ptx_text import REVERSE, module, per_thread

THREADS, BLOCKS = 128, 5


@pytest.mark.parametrize("batch_lanes", [1, 128, 300, 1 << 20])
def test_batches_do_not_change_results(batch_lanes: int) -> None:
    body = (
        f"{REVERSE} cvt.rn.f32.u32 %f0, %r7; rsqrt.approx.f32 %f1, %f0; "
        "fma.rn.f32 %f2, %f1, %f0, %f1;"
    )
    whole = per_thread(body, "%f2", THREADS, BLOCKS, np.float32)
    split = per_thread(body, "%f2", THREADS, BLOCKS, np.float32, batch_lanes=batch_lanes)
    np.testing.assert_array_equal(split.view(np.uint32), whole.view(np.uint32))


def scale_kernel() -> Kernel:
    """x *= s[0] in place; y = the old x."""
    text = module(
        """
  mul.wide.u32 %rd4, %r0, 4; add.u64 %rd5, %rd2, %rd4; add.u64 %rd6, %rd3, %rd4;
  ld.global.nc.f32 %f0, [%rd0]; ld.global.f32 %f1, [%rd5]; st.global.f32 [%rd6], %f1;
  mul.rn.f32 %f2, %f1, %f0; st.global.f32 [%rd5], %f2; ret;""",
        "s, x_in, x, y",
    )
    return Kernel(
        "k",
        text,
        (
            Buffer("s", f32, (1,), "in"),
            Buffer("x", f32, (64,), "inout"),
            Buffer("y", f32, (64,), "out"),
        ),
        (2, 1, 1),
        (32, 1, 1),
    )


def test_run_returns_results_and_leaves_operands() -> None:
    x, s = np.arange(64, dtype=np.float32), np.array([3], np.float32)
    before = x.copy()
    scaled, copy = simulator.run(scale_kernel(), s, x)
    np.testing.assert_array_equal(scaled, before * 3)
    np.testing.assert_array_equal(copy, before)
    np.testing.assert_array_equal(x, before)


def test_run_takes_operands_at_any_address() -> None:
    x, s = np.arange(65, dtype=np.float32)[1:], np.array([0, 3], np.float32)[1:]
    assert x.ctypes.data % 16 and s.ctypes.data % 16
    scaled, copy = simulator.run(scale_kernel(), s, x)
    np.testing.assert_array_equal([scaled, copy], [x * 3, x])


def test_run_checks_operands() -> None:
    x, s = np.zeros(64, np.float32), np.ones(1, np.float32)
    with pytest.raises(TypeError, match="takes 2 operands, got 1"):
        simulator.run(scale_kernel(), s)
    with pytest.raises(TypeError, match="operand x must be f32, got float64"):
        simulator.run(scale_kernel(), s, x.astype(np.float64))
    with pytest.raises(ValueError, match=r"operand x must have shape \(64,\), got \(8, 8\)"):
        simulator.run(scale_kernel(), s, x.reshape(8, 8))


def test_bf16_buffers_travel_as_bits() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    text = module(
        "mul.wide.u32 %rd4, %r0, 2; add.u64 %rd5, %rd0, %rd4; add.u64 %rd6, %rd1, %rd4;"
        "ld.global.b16 %h0, [%rd5]; st.global.b16 [%rd6], %h0; ret;",
        "x, y",
    )
    kernel = Kernel(
        "k",
        text,
        (Buffer("x", bf16, (32,), "in"), Buffer("y", bf16, (32,), "out")),
        (1, 1, 1),
        (32, 1, 1),
    )
    x = np.linspace(-2, 2, 32).astype(ml_dtypes.bfloat16)
    (y,) = simulator.run(kernel, x)
    assert y.dtype == np.uint16
    np.testing.assert_array_equal(y.view(ml_dtypes.bfloat16), x)
    with pytest.raises(TypeError, match="operand x must be bf16, got float16"):
        simulator.run(kernel, x.astype(np.float16))


def test_comments_are_no_instructions() -> None:
    body = (
        "mov.b32 %r3, 1; // mov.b32 %r3, 2; {\n /* bar.sync 0;\n } */ add.u32 %r3, %r3, 4; /* ; */"
    )
    np.testing.assert_array_equal(per_thread(body, "%r3"), np.full(32, 5))


def test_instructions_are_counted_per_lane_that_executes_them() -> None:
    text = module(
        "setp.lt.u32 %p0, %r2, 5;\n@!%p0 bra END;\nmov.u32 %r3, 1;\nmov.u32 %r4, 2;\nEND:\nret;",
        "y",
    )
    statistics = simulator.launch(text, [np.zeros(1, np.uint32)], (3,), (32,), batch_lanes=64)
    assert statistics == simulator.Statistics(3 * (8 * 32 + 2 * 5), 2)
