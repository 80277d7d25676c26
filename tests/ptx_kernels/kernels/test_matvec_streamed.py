"""Weights loaded past L1: only hints at their loads change in the text."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.matvec import PRESETS
from ptx_kernels.kernels.operands import random_operands
from ptx_kernels.machine_code.ptxas import TARGETS, assemble
from ptx_kernels.machine_code.sass import disassemble, load_bits
from ptx_kernels.ptx import Kernel
from ptx_kernels.simulator import run

HINTS = ".L1::no_allocate.L2::256B"
Q8, INLINE, F32 = PRESETS["quarter_warp_dp4a"], PRESETS["inline_q8"], PRESETS["vectorized"]
PAIR = dict(formats=("Q4_K", "Q6_K"), columns=512, m=1)
HEADS = dict(
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_dim=32,
    num_pages=2,
    page_size=4,
    pages="bf16",
    interleaved=True,
)
FAMILIES = {
    "matvec": (Q8, dict(format="Q6_K", n=32, columns=512, m=2)),
    "matvec-f32": (F32, dict(format="Q4_K", n=32, columns=512, m=1)),
    "matvec-experts": (INLINE, dict(format="Q4_K", n=32, columns=512, m=2, experts=3, top=2)),
    "gated_matvec": (INLINE, dict(n=32, norm=True, eps=1e-5, **PAIR)),
    "qkv_matvec": (INLINE, dict(rows=(32, 16), norm=True, eps=1e-5, **PAIR)),
    "qkv_append_matvec": (
        INLINE,
        dict(formats=("Q4_K",) * 3, columns=512, m=1, norm=True, eps=1e-5, **HEADS),
    ),
    "mixture_matvec": (Q8, dict(format="Q4_K", n=32, columns=512, m=1, experts=3, top=2)),
}


def both(name: str) -> tuple[Kernel, Kernel]:
    """Returns the kernel without hints and with hints."""
    config, arguments = FAMILIES[name]
    build = KERNELS[name.split("-")[0]]
    configs = (replace(config, streamed=streamed) for streamed in (False, True))
    plain, streamed = (build(**arguments, config=each) for each in configs)
    return plain, streamed


def body(kernel: Kernel) -> str:
    """The kernel's text without version and target."""
    return kernel.text.split("\n", 2)[2]


@pytest.mark.parametrize("name", FAMILIES)
def test_hints_stand_at_the_loads_of_weights_and_change_nothing(name):
    plain, streamed = both(name)
    assert HINTS not in plain.text
    assert body(streamed).replace(HINTS, "") == body(plain)
    assert streamed.text.startswith(".version 7.4\n.target sm_80\n")
    # norm weights, biases and activations are reused, so they may stay in L1
    hinted = re.findall(rf"ld\.global\.nc{re.escape(HINTS)}\S*", streamed.text)
    others = re.findall(r"ld\.global\.nc\.[vbusf]\S*", streamed.text)
    assert hinted and bool(others) == ("norm" in FAMILIES[name][1])
    operands = random_operands(plain)
    for got, want in zip(run(streamed, *operands), run(plain, *operands), strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.any(want)


@pytest.mark.parametrize("target", TARGETS)
def test_the_machine_code_has_them(target):
    _, streamed = both("mixture_matvec")
    assembly = assemble(streamed.text, target)
    assert not assembly.spill_store_bytes
    loads = [i.opcode for i in disassemble(assembly.cubin) if ".CONSTANT" in i.opcode]
    nbytes = 128 if target == "sm_80" else 256  # ptxas makes it so for that target
    assert loads and all(f".NA.LTC{nbytes}B." in load for load in loads)
    assert max(map(load_bits, loads)) == 128  # not the hint's 256
