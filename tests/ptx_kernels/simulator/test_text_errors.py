"""Errors of texts and launches."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_kernels import simulator

from .ptx_text import module
from .refusals import launch, refuses


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
        # as a parameter of the entry
        (
            ".shared .b8 y[4];",
            simulator.ParseError,
            ["y is declared twice"],
        ),
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
