"""Launches of a mixture of experts in Qwen3-30B-A3B's shape, compiled for an H200."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_q4k as jq
from jax_q4k import models
from ptx_kernels import formats
from tools import aot
from tools.launches import layer_launches
from tools.random_model import QWEN_3_30B_A3B, random_model

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))

EXPERTS, TOP, HIDDEN, INNER = 128, 8, 2048, 768


def stack(n: int, k: int, format: str) -> Any:
    """Shapes of packed matrices (EXPERTS, n, k)."""
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
        logits = jq.rms_norm_matmul(x, norm, router, eps=1e-6, activations="f32")
        return jq.routed_mlp(x, logits, gate, up, down, TOP, norm_weight=norm, eps=1e-6, residual=x)

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


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_token_takes_three_launches(tokens):
    """One launch computes the logits and two the experts; the first of these routes.

    Each has its norm.
    """
    first, second = f"routed_gated_matvec_q4_k_m{tokens}", f"mixture_matvec_q6_k_m{tokens}"
    assert launches(tokens) == ["router", first, second]


def test_a_layer_takes_eight_launches(record_property):
    """A step of two layers: five launches for attention, three for the experts."""
    model = random_model(dataclasses.replace(QWEN_3_30B_A3B, num_layers=2), abstract=True)
    function, arguments = models.abstract_programs(model, capacity=4096, cache_dtype=jnp.bfloat16)[
        "decode"
    ]
    program = aot.compile_program(function, *arguments, options=models.CUDA_COMPILER_OPTIONS)
    layers = [layer_launches(program, i) for i in range(2)]
    record_property("figure", f"qwen-3-30b-a3b: {len(layers[0])} kernels per layer")
    assert all(len(layer) <= 8 for layer in layers)
    assert all(t in program.ptx_launches for layer in layers for t in layer)
    assert all("router" in [t.name for t in layer] for layer in layers)


@pytest.mark.slow("compiles programs for a GPU")
def test_a_prompt_takes_three_products():
    """Takes no loop over experts; gate and up share XLA's sort and gather."""
    names = launches(512)
    assert sum(name.startswith("expert_gemm") for name in names) == 3
    assert names.count("quantize_q8_1") == 2 and sum("sort" in name for name in names) == 1
