"""Machine code of every subject gives the simulator's bits, for each generation."""

from __future__ import annotations

import functools

import pytest
from support.subjects import SUBJECTS, subject

from tools.machine_code.confirm import disagreement

#: The cheapest subject of each family.
QUICK = (
    *("quantize-f16", "f16_rows-norm", "rms_norm-q8_1", "matvec-Q6_K-4", "gated-silu"),
    *("route-sigmoid", "gemm-Q4_K-m8", "decode-Q5_K", "append-fp8", "rope_append-norm"),
    *("attention-soft_cap", "attention-cluster", "merge", "causal_attention-pages-window"),
)


@functools.cache
def _wants(label: str) -> tuple:
    return subject(label).run()


@pytest.mark.slow(
    "assembles and executes every kernel", quick=[f"{label}-sm_90" for label in QUICK]
)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("label", SUBJECTS)
def test_same_bits(label, target):
    """Copies arrive as late as they may, and the lowest address goes on first."""
    found = subject(label)
    if found.kernel.cluster != (1, 1, 1) and target == "sm_80":
        pytest.skip("sm_80 has no clusters")
    assert not disagreement(found.kernel, found.operands, target, _wants(label))


@pytest.mark.slow("executes every kernel")
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("label", SUBJECTS)
def test_same_bits_in_any_order(label, late):
    """Warps take turns at random, and copies arrive late or at once."""
    found = subject(label)
    options = {"late": late, "seed": int(late)}
    assert not disagreement(found.kernel, found.operands, "sm_90", _wants(label), **options)
