"""Fragments of mma and ldmatrix, compared element by element with the tables of the PTX ISA.

The tests also check errors.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from support.helpers import nmse
from support.tensor_kernels import WARPS, load_matrices, product

from ptx_kernels import simulator
from ptx_kernels.ptx import Builder, KernelError, bf16, f16, f32, kernel, s8, s32, u8, u32
from ptx_kernels.ptx.instructions import bf16_to_f32, f32_to_bf16

from .ptx_text import module


def element(words: np.ndarray, lane: int, register: int, index: int, type_: str) -> float:
    """Value `index` of a register; `words` is (registers, lanes) u32."""
    bits = words[register, lane : lane + 1]
    if type_ == "bf16":
        return float(bf16_to_f32(bits.view(np.uint16))[index])
    return float(bits.view({"s8": np.int8, "u8": np.uint8, "f16": np.float16}[type_])[index])


def matrices(
    a: np.ndarray, b: np.ndarray, a_type: str, b_type: str
) -> tuple[np.ndarray, np.ndarray]:
    """Assembles A (16, depth) and B (depth, 8) from one warp's fragments.

    Rows and columns of a_i and b_i follow the ISA's formulas.
    """
    size = 1 if a_type in ("s8", "u8") else 2
    per = 4 // size
    depth = b.shape[0] * 4 * per
    left, right = np.full((16, depth), np.nan), np.full((depth, 8), np.nan)
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        for i in range(a.shape[0] * per):  # a_i is in register i // per
            row = group if (i // per) % 2 == 0 else group + 8
            column = thread * per + i % per + (4 * per if i >= 2 * per else 0)
            left[row, column] = element(a, lane, i // per, i % per, a_type)
        for i in range(b.shape[0] * per):
            row = thread * per + i % per + (4 * per if i >= per else 0)
            right[row, group] = element(b, lane, i // per, i % per, b_type)
    assert np.isfinite(left).all() and np.isfinite(right).all()  # each element has been set
    return left, right


KINDS = [("s8", "s8", 2), ("u8", "s8", 2), ("s8", "u8", 1), ("u8", "u8", 2), ("s8", "s8", 1)]
KINDS += [("f16", "f16", 2), ("bf16", "bf16", 2), ("f16", "f16", 1)]


@pytest.mark.parametrize(("a_type", "b_type", "count"), KINDS, ids=str)
def test_product_of_fragments(a_type: str, b_type: str, count: int) -> None:
    rng = np.random.default_rng(count)
    integer = a_type in ("s8", "u8")
    a = rng.integers(0, 1 << 32, (WARPS, 2 * count, 32), np.uint32)
    b = rng.integers(0, 1 << 32, (WARPS, count, 32), np.uint32)
    c = rng.integers(-(1 << 31), 1 << 31, (WARPS, 4, 32)).astype(np.int32)
    if not integer:
        encode = f32_to_bf16 if a_type == "bf16" else lambda x: x.astype(np.float16).view(np.uint16)
        a = encode(rng.standard_normal((WARPS, 2 * count, 64), np.float32)).view(np.uint32)
        b = encode(rng.standard_normal((WARPS, count, 64), np.float32)).view(np.uint32)
        c = rng.standard_normal((WARPS, 4, 32), np.float32)
    (d,) = simulator.run(product(a_type=a_type, b_type=b_type, count=count), a, b, c)
    for warp in range(WARPS):
        left, right = matrices(a[warp], b[warp], a_type, b_type)
        for lane in range(32):
            for i in range(4):
                row, column = (lane >> 2) + 8 * (i // 2), lane % 4 * 2 + i % 2
                want = left[row] @ right[:, column] + float(c[warp, i, lane])
                if integer:
                    assert int(d[warp, i, lane]) == (int(want) + (1 << 31)) % (1 << 32) - (1 << 31)
                else:
                    assert d[warp, i, lane] == np.float32(want)


def test_perturbed_float_sums_differ_within_their_rounding() -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((WARPS, 4, 64), np.float32).astype(np.float16).view(np.uint32)
    b = rng.standard_normal((WARPS, 2, 64), np.float32).astype(np.float16).view(np.uint32)
    c = rng.standard_normal((WARPS, 4, 32), np.float32)
    (want,) = simulator.run(product(a_type="f16", b_type="f16", count=2), a, b, c)
    results = set()
    for seed in range(8):
        with simulator.perturbation(seed):
            (got,) = simulator.run(product(a_type="f16", b_type="f16", count=2), a, b, c)
        assert 0 < nmse(got, want) <= 1e-12
        results.add(got.tobytes())
    assert len(results) > 4


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count: int, transpose: bool) -> None:
    """Rows in any order: lane 8i + r points at row r of matrix i, 32 - lane rows from the start."""

    x = np.random.default_rng(0).integers(0, 1 << 32, (33, 4), np.uint32)
    (y,) = simulator.run(load_matrices(count=count, transpose=transpose), x)
    halves = x.view(np.uint16)  # (33, 8)
    for matrix in range(count):
        of = np.stack([halves[32 - (8 * matrix + r)] for r in range(8)])
        for lane in range(32):
            row, column = lane // 4, 2 * (lane % 4)
            pair = (
                (of[column, row], of[column + 1, row])
                if transpose
                else (of[row, column], of[row, column + 1])
            )
            assert tuple(y[matrix, lane : lane + 1].view(np.uint16)) == pair


MMA = "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
OPERANDS = "{%r4, %r5, %r6, %r7}, {%r8, %r8, %r8, %r8}, {%r8, %r8}, {%r8, %r8, %r8, %r8};"
LOAD = "mov.u32 %r9, rows;"
SHARED = ".shared .align 16 .b8 rows[512];"


def refused(
    error: type[simulator.SimulationError], body: str, message: str, target: int = 80
) -> None:
    text = module(f"mov.u32 %r8, 1;\n{body}\nret;", "y", target=target, outside=SHARED)
    with pytest.raises(error, match=f"(?s){message}"):
        simulator.launch(text, [np.zeros(64, np.uint32)], (1,), (64,))


@pytest.mark.parametrize(
    "instruction", [f"{MMA} {OPERANDS}", "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r4}, [%r9];"]
)
def test_part_of_a_warp_is_refused(instruction: str) -> None:
    message = (
        "20 of the warp's 32 lanes execute this.*line.*"
        + re.escape(instruction[:20])
        + ".*thread .32, 0, 0."
    )
    skip = "setp.ge.u32 %p0, %r2, 52; @%p0 bra out;\n"
    refused(simulator.WarpDivergence, f"{LOAD}{skip}{instruction}\nout:", message)
    guarded = instruction.replace("mma", "@!%p0 mma").replace("ldmatrix", "@!%p0 ldmatrix")
    refused(
        simulator.WarpDivergence,
        f"{LOAD}setp.ge.u32 %p0, %r2, 52;{guarded}",
        "20 of the warp's 32 lanes",
    )


@pytest.mark.parametrize(
    ("error", "body", "message"),
    [
        (
            simulator.UninitializedRead,
            f"{LOAD}ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r4}}, [%r9];",
            "rows.0",
        ),
        (
            simulator.OutOfBounds,
            f"{LOAD}ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r4}}, [%r9+512];",
            "offset 512",
        ),
        (
            simulator.Misaligned,
            f"{LOAD}add.u32 %r9, %r9, 8; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r4}}, [%r9];",
            "offset 8 is no multiple of 16",
        ),
        (
            simulator.UninitializedRead,
            f"{MMA} {OPERANDS.replace('%r8, %r8}, {', '%r8, %r10}, {', 1)}",
            "%r10",
        ),
        (
            simulator.TypeMismatch,
            f"{MMA} {OPERANDS.replace('{%r8, %r8},', '{%r8, %r8, %r8, %r8},')}",
            "a vector of 2",
        ),
        (simulator.TypeMismatch, f"{MMA} {OPERANDS.replace('%r4', '%f4')}", "%f4 is .f32"),
        (
            simulator.UnknownInstruction,
            f"{MMA.replace('.s32.s8', '.s32.s4')} {OPERANDS}",
            "no known instruction",
        ),
        (
            simulator.UnknownInstruction,
            f"{MMA.replace('k32', 'k64')} {OPERANDS}",
            "no known instruction",
        ),
        (
            simulator.UnknownInstruction,
            f"{LOAD}ldmatrix.sync.aligned.m8n8.x3.shared.b16 {{%r4}}, [%r9];",
            "no known",
        ),
    ],
)
def test_bad_instructions_are_refused(
    error: type[simulator.SimulationError], body: str, message: str
) -> None:
    refused(error, body, message)


def test_an_older_target_is_refused() -> None:
    refused(
        simulator.ParseError,
        f"{MMA} {OPERANDS}",
        r"needs PTX 7.0 and sm_80; the text declares 7.0 and sm_75",
        75,
    )


def test_ldmatrix_races_with_another_warp() -> None:
    store = (
        "mul.lo.u32 %r10, %r2, 8; add.u32 %r10, %r9, %r10; "
        "st.shared.v2.u32 [%r10], {%r8, %r8}; bar.warp.sync -1;"
    )
    load = "shl.b32 %r11, %r2, 4; and.b32 %r11, %r11, 496; add.u32 %r11, %r9, %r11;"
    load += "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r11];"
    refused(simulator.SharedRace, LOAD + store + load, "without a barrier between")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda k, w: k.mma([w] * 4, [w] * 2, [w.bits(s32)] * 4, s8, f16), "not s8 by f16"),
        (lambda k, w: k.mma([w] * 4, [w] * 2, [w.bits(f32)] * 4, f16, bf16), "not f16 by bf16"),
        (lambda k, w: k.mma([w] * 3, [w] * 2, [w.bits(s32)] * 4, u8), "not 3, 2 and 4"),
        (lambda k, w: k.mma([w] * 4, [w] * 2, [w.bits(s32)] * 4, f16), "mma.*needs f32, got s32"),
        (
            lambda k, w: k.ldmatrix(k.shared("x", u32, (4,)), 3),
            "1, 2 or 4 matrices from shared memory, not 3",
        ),
        (lambda k, w: k.ldmatrix(k.input("x", u32, (4,))), "not 4 from global"),
    ],
)
def test_the_builder_refuses(call, message: str) -> None:
    def wrong(k: Builder) -> None:
        k.launch((1,), 32)
        call(k, k.lane_id)

    with pytest.raises(KernelError, match=message):
        kernel(wrong)()
