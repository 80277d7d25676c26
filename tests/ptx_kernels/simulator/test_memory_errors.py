"""Errors of accesses to global memory, registers and shared memory."""

from __future__ import annotations

import numpy as np

from ptx_kernels import simulator
from ptx_kernels.ptx import Buffer, Kernel, f32

from .ptx_text import module, per_thread, store_u32
from .refusals import ADDRESS, launch, refuses

# --- global memory ---


def test_out_of_bounds_names_everything() -> None:
    y = np.zeros(100, np.uint32)
    with refuses(
        simulator.OutOfBounds,
        "kernel k",
        "4 bytes",
        "offset 400 of y, which has 400 bytes",
        "line 12",
        "st.global.b32 [%rd5], %r0;",
        "block (1, 0, 0), thread (36, 0, 0)",
    ):
        launch(f"{ADDRESS}\n st.global.b32 [%rd5], %r0;", y)


def test_block_and_thread_in_three_dimensions() -> None:
    text = module(
        "mov.u32 %r3, %tid.z; setp.eq.u32 %p0, %r3, 7; mov.u32 %r4, %ctaid.z; "
        "setp.eq.u32 %p1, %r4, 1;"
        "and.pred %p0, %p0, %p1; @%p0 st.global.b32 [%rd0+4], %r3; ret;",
        "y",
    )
    with refuses(simulator.OutOfBounds, "block (0, 0, 1), thread (0, 0, 7)"):
        simulator.launch(text, [np.zeros(1, np.uint32)], (5, 3, 2), (4, 2, 8))


def test_access_that_straddles_the_end() -> None:
    with refuses(simulator.OutOfBounds, "(16 bytes)", "offset 0 of y, which has 12 bytes"):
        launch("ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd0];", np.zeros(3, np.uint32))


def test_below_the_buffer() -> None:
    with refuses(simulator.OutOfBounds, "offset -4 of y"):
        launch("ld.global.u32 %r4, [%rd0-4];")


def test_second_buffer_is_out_of_reach_of_the_first() -> None:
    a, b = np.zeros(4, np.uint32), np.zeros(4, np.uint32)
    with refuses(simulator.OutOfBounds, "offset 16 of a, which has 16 bytes"):
        launch("ld.global.u32 %r4, [%rd0+16];", a, b, params="a, b")


def test_addresses_in_32_bits_fail() -> None:
    with refuses(simulator.OutOfBounds, "far from every buffer"):
        launch(
            "cvt.u32.u64 %r4, %rd0; cvt.u64.u32 %rd5, %r4; ld.global.u32 %r5, [%rd5];",
            np.zeros(4, np.uint32),
            np.zeros(4, np.uint32),
            params="a, b",
        )


def test_some_lanes_out_of_several_buffers() -> None:
    a, b = np.zeros(64, np.uint32), np.zeros(40, np.uint32)
    with refuses(simulator.OutOfBounds, "offset 164 of b", "thread (41, 0, 0)"):
        launch(
            "and.b32 %r3, %r0, 1; setp.eq.u32 %p0, %r3, 0; selp.b64 %rd3, %rd0, %rd1, %p0; "
            "mul.wide.u32 %rd4, %r0, 4; add.u64 %rd5, %rd3, %rd4; ld.global.b32 %r4, [%rd5];",
            a,
            b,
            params="a, b",
            grid=1,
        )


def test_misaligned() -> None:
    with refuses(
        simulator.Misaligned, "offset 4 of y, is no multiple of 16 bytes", "thread (1, 0, 0)"
    ):
        launch(
            f"{ADDRESS} ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd5];", np.zeros(132, np.uint32)
        )


def test_store_to_an_input() -> None:
    y = simulator.DeviceBuffer("weights", np.zeros(128, np.uint32), "in")
    with refuses(simulator.ReadOnlyWrite, "store to weights, which is an input"):
        launch(store_u32("%r0"), y)


def test_non_coherent_load_of_what_the_kernel_writes() -> None:
    with refuses(simulator.NonCoherentRead, "y, which the kernel may write"):
        launch("ld.global.nc.u32 %r4, [%rd0];")


def test_output_read_before_it_is_written() -> None:
    y = simulator.DeviceBuffer("y", np.zeros(128, np.uint32), "out", initialized=False)
    with refuses(simulator.UninitializedRead, "offset 0 of y: read of 4 bytes", "ld.global.u32"):
        launch("ld.global.u32 %r4, [%rd0];", y)
    half = simulator.DeviceBuffer("y", np.zeros(128, np.uint32), "out", initialized=False)
    with refuses(simulator.UninitializedRead, "offset 12 of y"):
        launch(
            f"{ADDRESS} st.global.u16 [%rd5], %r0; setp.lt.u32 %p0, %r0, 3; "
            "@%p0 st.global.u16 [%rd5+2], %r0; "
            "ld.global.u32 %r4, [%rd5];",
            half,
            grid=1,
        )


def test_output_left_unwritten() -> None:
    text = module(f"setp.lt.u32 %p0, %r0, 60; @!%p0 bra END; {store_u32('%r0')}\nEND: ret;", "y")
    kernel = Kernel("k", text, (Buffer("y", f32, (64,), "out"),), (1, 1, 1), (64, 1, 1))
    with refuses(
        simulator.UnwrittenOutput,
        "kernel k: 16 of the 256 bytes of y were never written, the first at offset 240",
    ):
        simulator.run(kernel)
    (y,) = simulator.run(kernel, check=False)
    assert np.isnan(y[60:]).all()


# --- registers ---


def test_register_that_nobody_wrote() -> None:
    with refuses(
        simulator.UninitializedRead, "register %r9 was never written", "add.u32 %r3, %r9, 1;"
    ):
        per_thread("add.u32 %r3, %r9, 1;", "%r3")


def test_register_that_some_lanes_wrote() -> None:
    body = "setp.lt.u32 %p0, %r2, 20; @%p0 mov.b32 %r3, 1;"
    with refuses(simulator.UninitializedRead, "register %r3", "thread (20, 0, 0)"):
        per_thread(f"{body} add.u32 %r4, %r3, 1;", "%r4")
    with refuses(simulator.UninitializedRead, "register %r3", "thread (20, 0, 0)"):
        per_thread(
            (
                "setp.ge.u32 %p0, %r2, 20;\n@%p0 bra SKIP;\nmov.b32 %r3, 1;\nSKIP:\n"
                "add.u32 %r4, %r3, 1;"
            ),
            "%r4",
        )
    with refuses(simulator.UninitializedRead, "register %r3", "thread (10, 0, 0)"):
        per_thread(
            "setp.ge.u32 %p0, %r2, 20;\n@%p0 mov.b32 %r3, 1;\n@%p0 bra SKIP;\n"
            "setp.lt.u32 %p1, %r2, 10;\n"
            "@%p1 mov.b32 %r3, 2;\nSKIP:\nadd.u32 %r4, %r3, 1;",
            "%r4",
        )
    both = per_thread(f"{body} @!%p0 mov.b32 %r3, 2; add.u32 %r4, %r3, 1;", "%r4")
    np.testing.assert_array_equal(both, np.where(np.arange(32) < 20, 2, 3))


# --- shared memory ---

TILE = (
    ".shared .align 16 .b8 tile[256]; mov.u32 %r3, tile; mad.lo.u32 %r4, %r2, 4, %r3; "
    "xor.b32 %r5, %r4, 128;"
)


def test_shared_read_of_nothing() -> None:
    with refuses(
        simulator.UninitializedRead,
        "shared tile+128: nobody wrote all of these 4 bytes",
        "thread (32, 0, 0)",
    ):
        launch(
            f"{TILE} setp.lt.u32 %p0, %r2, 32; @%p0 st.shared.b32 [%r4], %r2; bar.sync 0; "
            "ld.shared.b32 %r6, [%r4];"
        )


def test_shared_memory_starts_empty_in_every_batch() -> None:
    body = (
        f"{TILE} setp.eq.u32 %p0, %r0, %r2; @%p0 st.shared.b32 [%r4], %r2; "
        "ld.shared.b32 %r6, [%r4];"
    )
    with refuses(simulator.UninitializedRead, "block (1, 0, 0)"):
        launch(body, batch_lanes=64)


def test_shared_bounds_and_alignment() -> None:
    with refuses(simulator.OutOfBounds, "shared offset 256 (4 bytes): the block has 256 bytes"):
        launch(f"{TILE} st.shared.b32 [%r4+4], %r2;")
    with refuses(simulator.OutOfBounds, "shared offset 20 (4 bytes): the block has 20 bytes"):
        launch(".shared .align 16 .b8 small[20]; st.shared.b32 [small+20], %r2;")
    with refuses(simulator.OutOfBounds, "shared offset -1024"):
        launch("st.shared.b32 [0], %r2;")
    with refuses(simulator.Misaligned, "shared offset 4 is no multiple of 8 bytes"):
        launch(f"{TILE} setp.lt.u32 %p0, %r2, 9; @%p0 st.shared.b64 [%r4], %rd0;")


def test_missing_barrier_between_write_and_read() -> None:
    with refuses(
        simulator.SharedRace,
        "shared tile+128: warp 0 reads what warp 1 wrote, without a barrier between",
        "ld.shared.b32",
    ):
        launch(f"{TILE} st.shared.b32 [%r4], %r2; ld.shared.b32 %r6, [%r5];")
    launch(f"{TILE} st.shared.b32 [%r4], %r2; bar.sync 0; ld.shared.b32 %r6, [%r5];")


def test_missing_barrier_between_read_and_write() -> None:
    start = f"{TILE} st.shared.b32 [%r4], %r2; bar.sync 0;"
    with refuses(simulator.SharedRace, "warp 0 writes what warp 1 read"):
        launch(f"{start} ld.shared.b32 %r6, [%r5]; st.shared.b32 [%r4], %r6;")
    launch(f"{start} ld.shared.b32 %r6, [%r5]; bar.sync 0; st.shared.b32 [%r4], %r6;")
    for writer in (0, 63):
        with refuses(simulator.SharedRace, f"warp {writer // 32} writes what several warps read"):
            launch(
                f"{start} ld.shared.b32 %r6, [tile]; setp.eq.u32 %p0, %r2, {writer}; "
                "@%p0 st.shared.b32 [tile], %r6;"
            )
    with refuses(simulator.SharedRace, "warp 31 writes what several warps read"):
        launch(
            ".shared .b8 word[4]; setp.eq.u32 %p0, %r2, 1023; @%p0 st.shared.b32 [word], %r2; "
            "bar.sync 0; "
            "ld.shared.b32 %r6, [word]; @%p0 st.shared.b32 [word], %r6;",
            block=1024,
        )
    # sequentially
    with refuses(simulator.SharedRace, "warp 1 writes what several warps read"):
        launch(
            f"{start} setp.ge.u32 %p0, %r2, 32; @!%p0 ld.shared.b32 %r6, [tile]; "
            "@%p0 ld.shared.b32 %r6, [tile]; "
            "@%p0 st.shared.b32 [tile], %r6;"
        )


def test_two_warps_write_one_word() -> None:
    with refuses(simulator.SharedRace, "writes, at the same instruction, what warp 1 wrote"):
        launch(f"{TILE} st.shared.b32 [tile], %r2;")
    with refuses(simulator.SharedRace, "warp 1 writes what warp 0 wrote"):
        launch(
            f"{TILE} setp.eq.u32 %p0, %r2, 0; @%p0 st.shared.b32 [tile], %r2; "
            "setp.eq.u32 %p1, %r2, 32; "
            "@%p1 st.shared.b32 [tile], %r2;"
        )


def test_neighbouring_bytes_are_no_race() -> None:
    launch(
        ".shared .b8 t[64]; mov.u32 %r3, t; xor.b32 %r4, %r2, 32; and.b32 %r5, %r4, 32; "
        "shr.u32 %r5, %r5, 5; "
        "and.b32 %r4, %r2, 31; mad.lo.u32 %r4, %r4, 2, %r5; add.u32 %r4, %r4, %r3; "
        "st.shared.u8 [%r4], %r2; "
        "ld.shared.u8 %r6, [%r4];"
    )
