"""Long prompts compiled for an H200 without a GPU: decoded weights and cuBLAS products."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import jax_q4k as jq
from jax_q4k import models
from ptx_kernels.machine_code import ptxas
from tools import aot
from tools.launches import layer_launches
from tools.random_model import LLAMA_3_1_8B, random_model
from tools.thunks import Array, Thunk

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))

LAYERS = 3
CUBLAS = "__cublas$lt$matmul"


@functools.cache
def prefill(length: int, activations: str | None = None) -> aot.Program:
    """Prefill of three layers in Llama 3.1 8B's shape."""
    model = random_model(dataclasses.replace(LLAMA_3_1_8B, num_layers=LAYERS), abstract=True)
    with jq.implementation(activations=activations):
        function, arguments = models.abstract_programs(
            model, prompt_length=length, capacity=length, cache_dtype=jnp.bfloat16
        )["prefill"]
        return aot.compile_program(function, *arguments, options=models.CUDA_COMPILER_OPTIONS)


def products(launches: list[Thunk]) -> list[str]:
    """Result types of XLA's products."""
    found = [t.instruction for t in launches if t.kind == "kCublasLtMatmul"]
    return [str(each.results[0]) for each in found if each and each.target == CUBLAS]


def test_a_layer_of_a_long_prompt(record_property):
    """Each matrix is decoded, then multiplied by cuBLAS; XLA fuses the scales."""
    program = prefill(4096)
    layer = layer_launches(program, 1)
    ours = [t.name for t in layer if t in program.ptx_launches]
    assert [name for name in ours if not name.startswith("decode")] == [
        *("f16_rows", "rope_append", "split_keys", "causal_attention"),
        *("f16_rows", "f16_rows", "f16_rows"),
    ]
    assert sum(name.startswith("decode") for name in ours) == 7
    assert sorted(products(layer)) == sorted(
        [
            *("f32[4096,4096]", "f32[4096,1024]", "f32[4096,1024]", "f32[4096,4096]"),
            *("f16[4096,14336]", "f16[4096,14336]", "f32[4096,4096]"),
        ]
    )
    fusions = len(layer) - len(ours) - 7
    assert fusions <= 4  # queries; keys and values; the residual twice
    record_property("figure", f"llama-3.1-8b, prompt of 4096: {len(layer)} launches a layer")
    assert all(t.is_in("kCommandBuffer") for t in program.ptx_launches)
    assert not any(t.name.startswith("gemm_fusion") for t in program.launches)


@pytest.mark.slow("compiles programs for a GPU")
def test_each_matrix_is_multiplied_before_the_next_is_decoded(record_property):
    """Keeps at most one large decoded matrix in memory, and no gate in float32."""
    program = prefill(4096)
    large = [
        t.kind
        for t in program.launches
        if t.instruction
        and any(str(r) in ("f16[14336,4096]", "f16[4096,14336]") for r in t.instruction.results)
        and t.name != "f16_rows"
    ]
    pair = ["kCustomKernel", "kCublasLtMatmul"] * 2
    assert large == [*pair, "kCustomKernel"] * LAYERS  # gate, up; down, whose result is small
    results = {str(r) for t in program.launches if t.instruction for r in t.instruction.results}
    assert "f32[4096,14336]" not in results
    packed = prefill(4096, "q8_1")
    assert not products(packed.launches)
    more = program.temp_bytes - packed.temp_bytes
    record_property("figure", f"llama-3.1-8b, prompt of 4096: {more >> 20} MiB of memory more")
    assert more <= 600e6


@pytest.mark.parametrize("length", [4096])
def test_their_kernels_assemble(length):
    for assembly in ptxas.assemble_all(prefill(length).ptx_texts, ["sm_90"]).values():
        assert assembly.spill_store_bytes == assembly.spill_load_bytes == 0


def test_a_short_prompt_stays_packed():
    program = prefill(192)
    assert products(program.launches) == []
    assert not any(t.name.startswith("decode") for t in program.launches)
    results = {str(r) for t in program.launches if t.instruction for r in t.instruction.results}
    assert "f32[192,14336]" not in results


@pytest.mark.parametrize("stacked", [False, True])
def test_a_loop_decodes_again_in_every_turn(stacked):
    """Decoding of loop-invariant weights is not hoisted, which would keep them in memory."""
    blocks = jax.ShapeDtypeStruct((*(4,) * stacked, 4096, 16, 144), jnp.uint8)
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)

    @jax.jit
    def loop(x, blocks):
        w = jq.QuantizedArray("Q4_K", (*blocks.shape[:-2], 4096), (blocks,))

        def turn(i, x):
            return jq.matmul(x, w, index=i if stacked else None, residual=x)

        return jax.lax.fori_loop(0, 4, turn, x)

    program = aot.compile_program(loop, x, blocks, options=models.CUDA_COMPILER_OPTIONS)
    inside = [t.name for t in program.launches if t.is_in("kWhile")]
    outside = [t.name for t in program.launches if not t.is_in("kWhile")]
    assert inside.count("decode_q4_k") == inside.count("kCublasLtMatmul") == 1
    assert not any(name.startswith("decode") for name in outside)
    assert not program.rewrites(Array("u8", blocks.shape))


def test_by_itself_xla_takes_a_kernel_of_its_own():
    """XLA cannot measure ahead of time and picks its own kernel.

    The compiler options of models select cuBLAS.
    """
    x, w = (jax.ShapeDtypeStruct((n, 4096), jnp.float16) for n in (4096, 14336))

    @jax.jit
    def product(x, w):
        return jax.lax.dot_general(
            x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )

    (own,) = aot.compile_program(product, x, w).launches
    assert own.name.startswith("gemm_fusion")
    (cublas,) = aot.compile_program(product, x, w, options=models.CUDA_COMPILER_OPTIONS).launches
    assert cublas.kind == "kCublasLtMatmul"
