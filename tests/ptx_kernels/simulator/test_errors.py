"""Everything the simulator refuses, with what the message says."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ptx_kernels import simulator
from ptx_kernels.ptx import Buffer, Kernel, f32

from .ptx_text import module, per_thread, store_u32

ADDRESS = "mul.wide.u32 %rd4, %r0, 4; add.u64 %rd5, %rd0, %rd4;"


def launch(
    body: str,
    *buffers: object,
    params: str = "y",
    grid: int = 2,
    block: int = 64,
    **options: object,
) -> None:
    given = buffers or (np.zeros(grid * block, np.uint32),)
    simulator.launch(module(body + "\n  ret;", params), list(given), (grid,), (block,), **options)


def refuses(error: type[simulator.SimulationError], *parts: str):
    """The error, whose message holds every part in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(re.escape(p) for p in parts))


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
    with refuses(
        simulator.SharedRace, "warp 1 writes what several warps read"
    ):  # one after the other
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


# --- warps and barriers ---


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
    with refuses(
        simulator.ShuffleError, "membermask 0xffffffff names lanes 0xffff,"
    ):  # 32 lanes of two warps
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


# --- text ---


@pytest.mark.parametrize(
    ("body", "error", "parts"),
    [
        (
            "fma.f32 %f0, %f1, %f2, %f3;",
            simulator.UnknownInstruction,
            ["fma.f32 is no known instruction", "line 11"],
        ),
        ("ld.globl.u32 %r3, [%rd0];", simulator.UnknownInstruction, ["ld.globl.u32"]),
        ("ld.shared.nc.u32 %r3, [0];", simulator.UnknownInstruction, ["ld.shared.nc.u32"]),
        (
            "ld.global.v4.u64 {%rd3, %rd4, %rd5, %rd6}, [%rd0];",
            simulator.UnknownInstruction,
            ["ld.global.v4.u64"],
        ),
        ("ld.global.f16 %h0, [%rd0];", simulator.UnknownInstruction, ["ld.global.f16"]),
        (
            "st.global.nc.u32 [%rd0], %r2;",
            simulator.UnknownInstruction,
            ["only loads can be non-coherent"],
        ),
        ("ld.global.v8.u32 %r3, [%rd0];", simulator.UnknownInstruction, ["ld.global.v8.u32"]),
        ("bar.arrive 0, 64;", simulator.UnknownInstruction, ["bar.arrive"]),
        ("shfl.bfly.b32 %r3, %r2, 1, 31;", simulator.UnknownInstruction, ["shfl.bfly.b32"]),
        (
            "shfl.sync.bfly.b32 %r3|%r4, %r2, 1, 31, -1;",
            simulator.TypeMismatch,
            ["%r4 is no predicate"],
        ),
        ("add.u32 %r3, %r2;", simulator.ParseError, ["add.u32 takes 3 operands, got 2"]),
        (
            "add.u32 %r3, %f2, 1;",
            simulator.TypeMismatch,
            ["add.u32 needs u32 in a .b32 register, but %f2 is .f32"],
        ),
        (
            "add.rn.f32 %rd3, %f2, %f2;",
            simulator.TypeMismatch,
            ["needs f32 in a .f32 register, but %rd3 is .b64"],
        ),
        (
            "add.u32 %r3, %r2, 0x100000000;",
            simulator.TypeMismatch,
            ["0x100000000 does not fit u32"],
        ),
        (
            "add.u32 %r3, %r2, -0x80000001;",
            simulator.TypeMismatch,
            ["-0x80000001 does not fit u32"],
        ),
        ("add.rn.f32 %f0, %f1, 1;", simulator.TypeMismatch, ["1 is no number of type f32"]),
        ("add.u32 %r3, %r2, 1.5;", simulator.TypeMismatch, ["1.5 is no number of type u32"]),
        (
            "ld.global.u32 %r3, [%r2];",
            simulator.TypeMismatch,
            ["a global address needs a .b64 register, but %r2 is .b32"],
        ),
        (
            "ld.global.v2.u32 {%r3, %r4, %r5}, [%rd0];",
            simulator.TypeMismatch,
            ["moves 2 register(s)"],
        ),
        ("ld.global.f32 %r3, %rd0;", simulator.TypeMismatch, ["an address in brackets is missing"]),
        ("mov.b32 {%h0, %r1}, %r2;", simulator.TypeMismatch, ["do not make up 4 bytes"]),
        ("add.u32 %r99, %r2, 1;", simulator.ParseError, ["register %r99 is not declared"]),
        (
            "mov.u32 %r3, nowhere;",
            simulator.ParseError,
            ["nowhere is neither a variable nor a special register"],
        ),
        ("bra NOWHERE;", simulator.ParseError, ["branches to no label"]),
        ("L: add.u32 %r3, %r2, 1; L: ret;", simulator.ParseError, ["label L is defined twice"]),
        (".reg .b32 %r3;", simulator.ParseError, ["register %r3 is declared twice"]),
        (".reg .f64 %d<3>;", simulator.ParseError, ["declares no register class"]),
        (".local .b8 t[4]; .local .b8 t[4];", simulator.ParseError, ["t is declared twice"]),
        (
            ".local .b8 t[99999999999];",
            simulator.ParseError,
            ["t ends at 99999999999 bytes of .local memory; 524288"],
        ),
        (
            ".local .b8 s; .local .align 1048576 .b8 t;",
            simulator.ParseError,
            ["t ends at 1048577 bytes of .local"],
        ),
        (
            ".const .b8 t[65537];",
            simulator.ParseError,
            ["t ends at 65537 bytes of .const memory; 65536 are the most"],
        ),
        (
            ".global .b8 t[99999999999];",
            simulator.ParseError,
            ["t ends at 99999999999 bytes of .global memory"],
        ),
        (".shared .align 0 .b8 t[4];", simulator.ParseError, ["alignment 0 is no power of two"]),
        (
            ".reg .b32 %q<99999999999>;",
            simulator.ParseError,
            ["99999999999 registers %q; the simulator takes up to"],
        ),
        ("fence;", simulator.UnknownInstruction, ["fence is no known instruction"]),
        (
            ".shared .b8 y[4];",
            simulator.ParseError,
            ["y is declared twice"],
        ),  # as a parameter of the entry
        (".local .b8 y[4];", simulator.ParseError, ["y is declared twice"]),
        (".reg .b32 y;", simulator.ParseError, ["register y is declared twice"]),
        (".param .b32 y;", simulator.ParseError, ["parameter y is declared twice"]),
        ("y: ret;", simulator.ParseError, ["y is declared twice"]),
        (".shared .b8 %r3[4];", simulator.ParseError, ["%r3 is declared twice"]),
        (".shared .b8 t[4]; .reg .b32 t;", simulator.ParseError, ["register t is declared twice"]),
        (".tex .b8 x[4];", simulator.ParseError, ["unknown directive .tex"]),
        ("call nobody, ();", simulator.ParseError, ["calls nobody, which has no body"]),
        ("call %rd3, ();", simulator.ParseError, ["calls of functions by name"]),
        ("brx.idx %r3, T;", simulator.ParseError, ["the label of .branchtargets"]),
        ("ld.const.u32 %r3, [y];", simulator.ParseError, ["y is no const variable"]),
        (
            "@%r3 bra L; L: ret;",
            simulator.ParseError,
            ["%r3 guards an instruction but is no predicate"],
        ),
        ("bar.sync 16;", simulator.ParseError, ["a barrier 0 to 15"]),
        ("bar.sync 0, 0;", simulator.ParseError, ["a multiple of 32"]),
        ("bar.sync 0, 33;", simulator.ParseError, ["a multiple of 32"]),
        ("add.u32 %r3, %r2, 1 + 2;", simulator.ParseError, ["`1 + 2` is no operand"]),
        ("ld.global.u32 %r3, [%rd0 * 4];", simulator.ParseError, ["[%rd0 * 4] is no address"]),
        ("ld.param.u64 %rd3, [z];", simulator.ParseError, ["names no parameter"]),
        ("ld.param.u64 %rd3, [y+8];", simulator.ParseError, ["names no parameter"]),
        (".shared .b8 t[4]; .shared .b8 t[4];", simulator.ParseError, ["t is declared twice"]),
        ("mov.u64 %rd3, %tid.x;", simulator.TypeMismatch, ["%tid.x is a .u32"]),
        (
            "ld.global.f32 %rd3, [%rd0];",
            simulator.TypeMismatch,
            ["needs f32 in a .f32 register, but %rd3 is .b64"],
        ),
        (".shared .align 12 .b8 t[4];", simulator.ParseError, ["alignment 12 is no power of two"]),
    ],
)
def test_text_that_is_refused(
    body: str, error: type[simulator.SimulationError], parts: list[str]
) -> None:
    with refuses(error, "kernel k", *parts):
        launch(body)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (".version 7.0\n", "\n", ".version and .target"),
        (".address_size 64\n", "\n", ".address_size 64 is missing"),
        (".param .u64 y", ".param .u64 y, .param .u64 y", "y is declared twice"),
        (".entry k", ".entri k", "expected one .entry, found 0"),
        (".param .u64 y", ".param .u32 y", "names no parameter of the kernel"),
        (".param .u64 y", ".reg .u32 y", "is no .param declaration"),
        ("ret;\n}", "ret\n}", "lacks its ;"),
        ("ret;\n}", "ret;\n", "lacks its }"),
        ("ret;\n}", "}", "a ret is missing"),
        ("ret;\n}", "bra END;\nEND:\n}", "branches past the last instruction"),
        (") {", ") .maxclusterrank 4 {", "unknown directive .maxclusterrank"),
        ("ret;\n}", "ret;\n} more", "no declaration that the simulator knows"),
        (".visible", ".extern .global .b8 g[4]; .visible", "g is defined elsewhere"),
        (".visible", ".const .b64 g[1] = {k}; .visible", "an initializer of anything but numbers"),
    ],
)
def test_modules_that_are_refused(old: str, new: str, message: str) -> None:
    text = module("  ret;", "y")
    assert old in text
    with refuses(simulator.ParseError, message):
        simulator.launch(text.replace(old, new, 1), [np.zeros(4, np.uint32)], (1,), (32,))


def test_instruction_that_the_target_lacks() -> None:
    body = "mov.f32 %f0, 0f3F800000; cvt.rn.bf16.f32 %h0, %f0; ret;"
    with refuses(simulator.ParseError, "needs PTX 7.0 and sm_80; the text declares 7.0 and sm_75"):
        simulator.launch(module(body, "y", target=75), [np.zeros(4, np.uint32)], (1,), (32,))
    with refuses(simulator.ParseError, "needs PTX 7.0 and sm_61; the text declares 6.5 and sm_80"):
        simulator.launch(module(body, "y", version="6.5"), [np.zeros(4, np.uint32)], (1,), (32,))


def test_launches_that_do_not_fit() -> None:
    y = np.zeros(64, np.uint32)
    text = module("ret;", "y")
    with refuses(simulator.LaunchError, "has 1 parameters ('y',), got 2 arguments"):
        simulator.launch(text, [y, y], (1,), (32,))
    with refuses(simulator.LaunchError, "block=(1025, 1, 1) exceeds 1024 threads"):
        simulator.launch(text, [y], (1,), (1025,))
    with refuses(simulator.LaunchError, "64 along z"):
        simulator.launch(text, [y], (1,), (1, 1, 128))
    with refuses(simulator.LaunchError, "grid=(1, 65536, 1) exceeds"):
        simulator.launch(text, [y], (1, 65536), (32,))
    with refuses(simulator.LaunchError, "at least 1"):
        simulator.launch(text, [y], (0,), (32,))
    with refuses(simulator.LaunchError, "one to three extents"):
        simulator.launch(text, [y], (1, 1, 1, 1), (32,))
    with refuses(simulator.LaunchError, "-16 bytes of shared memory"):
        simulator.launch(text, [y], (1,), (32,), -16)
    with refuses(simulator.LaunchError, "bytes of shared memory"):
        simulator.launch(text, [y], (1,), (32,), 1 << 20)
    required = text.replace(")", ")\n.reqntid 64, 1, 1", 1)
    with refuses(simulator.LaunchError, "block=(32, 1, 1), but .reqntid says (64, 1, 1)"):
        simulator.launch(required, [y], (1,), (32,))
    bounded = text.replace(")", ")\n.maxntid 8, 4, 1\n.minnctapersm 2", 1)
    simulator.launch(bounded, [y], (1,), (32,))
    with refuses(simulator.LaunchError, "64 threads, but .maxntid allows 32"):
        simulator.launch(bounded, [y], (1,), (64,))
    y.flags.writeable = False
    with pytest.raises(ValueError, match="role inout but its array is read-only"):
        simulator.launch(text, [y], (1,), (32,))
    with pytest.raises(ValueError, match="must be C-contiguous and 16-byte aligned"):
        simulator.launch(text, [np.zeros(65, np.uint32)[1:]], (1,), (32,))
    with pytest.raises(ValueError, match="must be C-contiguous"):
        simulator.launch(text, [np.zeros((8, 8), np.uint32)[:, ::2]], (1,), (32,))
    for no_array in (None, 5, [0] * 32, np.zeros(32, object)):
        with pytest.raises(TypeError, match="buffer y must be a NumPy array of numbers, not"):
            simulator.launch(text, [no_array], (1,), (32,))


def test_missing_broadcast_after_a_reduction_shows() -> None:
    """shfl.down leaves the sum in lane 0 alone: the other lanes must differ, as on a GPU."""
    steps = "\n".join(
        f"shfl.sync.down.b32 %r4, %r3, {m}, 31, -1; add.u32 %r3, %r3, %r4;"
        for m in (16, 8, 4, 2, 1)
    )
    got = per_thread(f"mov.b32 %r3, %r2; {steps}", "%r3")
    assert got[0] == np.arange(32).sum()
    assert (got[1:] != got[0]).all()
