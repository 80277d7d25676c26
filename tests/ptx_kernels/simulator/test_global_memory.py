"""Global memory and moves in handwritten PTX, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_kernels import simulator

from .ptx_text import module, per_thread, store_u32


@pytest.mark.parametrize(
    ("type", "dtype"),
    [
        ("u8", np.uint8),
        ("s8", np.int8),
        ("u16", np.uint16),
        ("s16", np.int16),
        ("b16", np.uint16),
        ("u32", np.uint32),
    ],
)
def test_narrow_loads_extend_and_stores_truncate(type: str, dtype: type) -> None:
    size = np.dtype(dtype).itemsize
    a = np.random.default_rng(0).integers(0, 256, 64 * size, np.uint8)
    b, y = np.zeros(64 * size, np.uint8), np.zeros(64, np.uint32)
    text = module(f"""
  mul.wide.u32 %rd4, %r0, {size}; add.u64 %rd5, %rd0, %rd4; add.u64 %rd6, %rd1, %rd4;
  ld.global.{type} %r3, [%rd5];
  st.global.{type} [%rd6], %r3;
  {store_u32("%r3", "%rd2")} ret;""")
    simulator.launch(text, [a, b, y], (2,), (32,))
    np.testing.assert_array_equal(b, a)
    np.testing.assert_array_equal(y, a.view(dtype).astype(np.int64).astype(np.uint32))


@pytest.mark.parametrize(
    ("vector", "registers"),
    [
        ("v4.u32", "%r4, %r5, %r6, %r7"),
        ("v2.u64", "%rd5, %rd6"),
        ("v4.f32", "%f0, %f1, %f2, %f3"),
        ("v2.u32", "%r4, %r5"),
        ("v4.u16", "%h0, %h1, %h2, %h3"),
        ("v4.b8", "%h0, %h1, %h2, %h3"),
    ],
)
def test_vectors_copy_every_bit(vector: str, registers: str) -> None:
    lanes = int(vector[1])
    size = lanes * int(vector.split(".")[1][1:]) // 8
    a = np.random.default_rng(1).integers(0, 256, 96 * size, np.uint8)
    a[:size] = 0xFF  # a NaN in any float type
    y = np.zeros_like(a)
    text = module(
        f"""
  mul.wide.u32 %rd4, %r0, {size}; add.u64 %rd8, %rd0, %rd4; add.u64 %rd9, %rd1, %rd4;
  ld.global.nc.L1::no_allocate.L2::128B.{vector} {{{registers}}}, [%rd8];
  st.global.{vector} [%rd9], {{{registers}}}; ret;""",
        "a, y",
    )
    simulator.launch(
        text,
        [
            simulator.DeviceBuffer("a", a, "in"),
            simulator.DeviceBuffer("y", y, "out", initialized=False),
        ],
        (3,),
        (32,),
    )
    np.testing.assert_array_equal(y, a)


def test_of_lanes_that_store_to_one_place_the_highest_wins() -> None:
    y = np.zeros(2, np.uint32)
    simulator.launch(
        module(
            "st.global.b32 [%rd0], %r0; mov.u64 %rd3, %rd0; setp.lt.u32 %p0, %r2, 7; "
            "cvt.u64.u32 %rd4, %r0; and.b64 %rd4, %rd4, 0; add.u64 %rd5, %rd0, %rd4; "
            "@%p0 st.global.b32 [%rd5+4], %r0; ret;",
            "y",
        ),
        [y],
        (1,),
        (32,),
    )
    np.testing.assert_array_equal(y, [31, 6])


def test_lanes_that_load_from_several_buffers() -> None:
    a, b = np.arange(64, dtype=np.uint32), np.arange(64, dtype=np.uint32) + 1000
    y = np.zeros(64, np.uint32)
    text = module(f"""
  and.b32 %r3, %r0, 1; setp.eq.u32 %p0, %r3, 0; selp.b64 %rd3, %rd0, %rd1, %p0;
  mul.wide.u32 %rd4, %r0, 4; add.u64 %rd5, %rd3, %rd4; ld.global.b32 %r4, [%rd5];
  {store_u32("%r4", "%rd2")} ret;""")
    simulator.launch(text, [a, b, y], (2,), (32,))
    np.testing.assert_array_equal(y, np.where(np.arange(64) % 2, b, a))


def test_lanes_that_store_to_several_buffers() -> None:
    a, b = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    text = module(
        "and.b32 %r3, %r0, 1; setp.eq.u32 %p0, %r3, 0; selp.b64 %rd3, %rd0, %rd1, %p0; "
        "mul.wide.u32 %rd4, %r0, 4; add.u64 %rd5, %rd3, %rd4; st.global.b32 [%rd5], %r0; ret;",
        "a, b",
    )
    simulator.launch(text, [a, b], (2,), (32,))
    np.testing.assert_array_equal(
        [a, b], [np.where(np.arange(64) % 2 == i, np.arange(64), 0) for i in range(2)]
    )


def test_an_array_given_twice_has_one_address() -> None:
    y = np.zeros(64, np.uint32)
    text = module(
        (
            "sub.u64 %rd3, %rd0, %rd1; cvt.u32.u64 %r3, %rd3; add.u32 %r3, %r3, 5; "
            f"{store_u32('%r3')} ret;"
        ),
        "a, b",
    )
    simulator.launch(text, [y, y], (2,), (32,))
    assert (y == 5).all()


def test_offsets_beyond_32_bits_reach_their_bytes() -> None:
    large = np.zeros((3 << 30) + (2 << 30), np.uint8)  # the system allocates only touched pages
    large[(4 << 30) + 5] = 77
    y = np.zeros(32, np.uint32)
    text = module(
        f"""
  mov.b64 %rd4, 0x100000000; add.u64 %rd5, %rd0, %rd4; ld.global.u8 %r3, [%rd5+5];
  {store_u32("%r3", "%rd1")} ret;""",
        "a, y",
    )
    simulator.launch(text, [simulator.DeviceBuffer("a", large, "in"), y], (1,), (32,))
    assert (y == 77).all()


def test_packing_and_unpacking() -> None:
    body = """
  cvt.u16.u32 %h0, %r0; mov.b16 %h1, 0x1234; mov.b32 %r3, {%h0, %h1};
  mov.b32 {%h2, %h3}, %r3; cvt.u32.u16 %r4, %h2; cvt.u32.u16 %r5, %h3; add.u32 %r6, %r4, %r5;
  mov.b64 %rd4, {%r3, %r6}; mov.b64 {%r7, %r8}, %rd4; add.u32 %r9, %r7, %r8;"""
    thread = np.arange(64, dtype=np.uint32)
    np.testing.assert_array_equal(
        per_thread(body, "%r9", 64), (thread | 0x12340000) + thread + 0x1234
    )


def test_moves_between_classes_keep_bits() -> None:
    body = (
        "cvt.rn.f32.u32 %f0, %r0; mov.b32 %r3, %f0; mov.b32 %f1, %r3; neg.f32 %f2, %f1; "
        "mov.b32 %r4, %f2;"
    )
    got = per_thread(body, "%r4").view(np.float32)
    np.testing.assert_array_equal(got, -np.arange(32, dtype=np.float32))
