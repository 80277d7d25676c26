"""Loops over layers of stacked weights, compiled for an H200 without a GPU: nothing is copied."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_q4k as jq
from jax_q4k import models
from ptx_kernels.machine_code import ptxas
from tools import aot

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))

LAYERS, N = 4, 512


def stack(format: str) -> jq.QuantizedArray:
    """Shapes of stacked weights."""
    block = jq.formats.get(format)
    planes = [
        jax.ShapeDtypeStruct((LAYERS, N, N // block.block_size, plane.bytes_per_block), jnp.uint8)
        for plane in block.planes
    ]
    return jq.QuantizedArray(format, (LAYERS, N, N), planes)


def indexed(x: Any, w: Any, v: Any) -> Any:
    def layer(i: Any, x: Any) -> Any:
        q, k = jq.qkv_matmul(x, (w, v), index=i)
        return jq.mlp(q + k, w, v, w, index=i, residual=x)

    return jax.lax.fori_loop(0, LAYERS, layer, x)


def sliced(x: Any, w: Any, v: Any) -> Any:
    return jax.lax.fori_loop(0, LAYERS, lambda i, x: jq.matmul(x, w[i]), x)


def gradient(x: Any, w: Any, v: Any) -> Any:
    def loss(x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda x, i: (layer(x, i), None), x, jnp.arange(LAYERS))[0])

    def layer(x: Any, i: Any) -> Any:
        return jq.matmul(x, v, index=i, activations="f32")

    return jax.grad(loss)(x)


def mapped(x: Any, w: Any, v: Any) -> Any:
    """Multiplies each row by its own matrix."""
    return jax.vmap(jq.matmul)(x, w)


def compiled(function: Any, rows: int) -> tuple[aot.Program, list[str]]:
    """Returns the program, and the packed arrays that it writes."""
    program = aot.compile_program(
        jax.jit(function),
        jax.ShapeDtypeStruct((rows, N), jnp.float32),
        stack("Q4_K"),
        stack("Q6_K"),
        options=models.CUDA_COMPILER_OPTIONS,
    )
    written = [r for t in program.launches if t.instruction for r in t.instruction.results]
    return program, [str(array) for array in written if array.dtype == "u8"]


@pytest.mark.parametrize(
    ("function", "rows"), [(indexed, 1), (indexed, 64), (gradient, 1), (mapped, LAYERS)]
)
def test_no_layer_is_copied(function: Any, rows: int) -> None:
    program, written = compiled(function, rows)
    assert program.ptx_launches and written == []
    assert all(t.is_in("kCommandBuffer") for t in program.ptx_launches)
    for assembly in ptxas.assemble_all(program.ptx_texts, ["sm_90"]).values():
        assert assembly.spill_store_bytes == assembly.spill_load_bytes == 0


def test_a_slice_is_copied() -> None:
    """XLA cannot pass the address of a slice to one of our kernels."""
    program, written = compiled(sliced, 1)
    assert f"u8[1,{N},{N // 256},144]" in written
    assert program.temp_bytes >= N * N // 256 * 144
