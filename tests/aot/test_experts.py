"""A mixture's feed-forward network compiled for an H200, at Qwen3-30B-A3B's shape: its launches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_q4k as jq
from jax_q4k import models
from ptx_kernels import formats
from tools import aot

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))

EXPERTS, TOP, HIDDEN, INNER = 128, 8, 2048, 768


def stack(n: int, k: int, format: str) -> Any:
    """The shapes of packed matrices (EXPERTS, n, k)."""
    block = formats.get(format)
    shape = EXPERTS, n, k // block.block_size
    planes = [
        jax.ShapeDtypeStruct((*shape, plane.bytes_per_block), jnp.uint8) for plane in block.planes
    ]
    one = jq.quantize(jnp.ones((1, 1, block.block_size)), format)
    return jax.tree.unflatten(jax.tree.structure(one), planes)


def launches(tokens: int) -> list[str]:
    """Kernels of norm, router, experts and residual, in order."""

    def layer(x: Any, norm: Any, router: Any, gate: Any, up: Any, down: Any) -> Any:
        logits = jnp.dot(jq.rms_norm(x, norm, eps=1e-6), router.T, precision="highest")
        ids, weights = jq.route(logits, TOP)
        return jq.expert_mlp(
            x, gate, up, down, ids, weights, norm_weight=norm, eps=1e-6, residual=x
        )

    rows, norm, router = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((tokens, HIDDEN), (HIDDEN,), (EXPERTS, HIDDEN))
    )
    matrices = (stack(INNER, HIDDEN, "Q4_K"),) * 2, stack(HIDDEN, INNER, "Q6_K")
    program = aot.compile_program(
        jax.jit(layer),
        rows,
        norm,
        router,
        *matrices[0],
        matrices[1],
        options=models.CUDA_COMPILER_OPTIONS,
    )
    assert not program.loops
    return [launch.name for launch in program.launches]


def test_a_token_takes_five_launches():
    """The norm, the logits (XLA's), the route, and two for the experts."""
    rms_norm, _, *others = launches(1)
    assert rms_norm == "rms_norm"
    assert others == ["route", "expert_gated_matvec_q4_k_m1", "mixture_matvec_q6_k_m1"]


def test_a_prompt_takes_three_products():
    """No loop over the experts, and gate and up share what XLA sorts and gathers."""
    names = launches(512)
    assert sum(name.startswith("expert_gemm") for name in names) == 3
    assert names.count("quantize_q8_1") == 2 and sum("sort" in name for name in names) == 1
