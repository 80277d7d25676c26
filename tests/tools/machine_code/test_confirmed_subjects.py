"""Machine code of every subject gives the simulator's bits, for each generation."""

from __future__ import annotations

import functools

import pytest
from support.subjects import SUBJECTS, Subject, subject

from ptx_kernels.ptx import KernelError
from ptx_kernels.ptx.oldest import COMMON
from tools.machine_code import load
from tools.machine_code.confirm import disagreement

#: The cheapest subject of each family.
QUICK = (
    *("quantize-f16", "f16_rows-norm", "rms_norm-q8_1", "matvec-Q6_K-4", "gated-silu"),
    *("route-sigmoid", "gemm-Q4_K-m8", "decode-Q5_K", "append-fp8", "rope_append-norm"),
    *("attention-soft_cap", "attention-cluster", "merge", "causal_attention-pages-window"),
)


#: Subjects that sm_75 computes by other instructions: products of bytes and of halves, copies.
QUICK_OF_TURING = ("gemm-Q4_K-m8", "attention-tensor_cores-f16", "gemm-MXFP4")


def _built(label: str, target: str) -> Subject:
    try:
        found = subject(label, min(int(target[3:]), COMMON))
    except KernelError as error:
        pytest.skip(f"tests/ptx_kernels/test_turing.py lists it: {error}")
    if found.kernel.cluster != (1, 1, 1) and target == "sm_80":
        pytest.skip("sm_80 has no clusters")
    return found


@functools.cache
def _wants(label: str, oldest: int = COMMON) -> tuple:
    return subject(label, oldest).run()


@pytest.mark.slow(
    "assembles and executes every kernel",
    quick=[f"{label}-sm_90" for label in QUICK] + [f"{label}-sm_75" for label in QUICK_OF_TURING],
)
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("label", SUBJECTS)
def test_same_bits(label, target):
    """Copies arrive as late as they may, and the lowest address goes on first."""
    found = _built(label, target)
    wants = _wants(label, min(int(target[3:]), COMMON))
    assert not disagreement(load(found.kernel, target), found.operands, wants)


@pytest.mark.slow("executes every kernel")
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("label", SUBJECTS)
def test_same_bits_in_any_order(label, late):
    """Warps take turns at random, and copies arrive late or at once."""
    found = subject(label)
    options = {"late": late, "seed": int(late)}
    assert not disagreement(load(found.kernel), found.operands, _wants(label), **options)
