"""Code-book and ternary formats and NVFP4, which have no tensor-core product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.format_lists import EIGHTS
from support.helpers import nmse
from support.implementations import IMPLEMENTATIONS
from support.oracles import activation_operands, dequantized, quantized, random_planes, weights
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k.native import calls
from ptx_kernels import formats, simulator
from ptx_kernels.formats.unpack import codebooks
from ptx_kernels.kernels.gemm import GemmConfig
from ptx_kernels.kernels.matvec import MatvecConfig, matvec, matvec_rule
from ptx_kernels.ptx import KernelError
from ptx_kernels.tuning import choose


def packed(format: str, n: int, k: int) -> jq.QuantizedArray:
    block = formats.get(format)
    planes = random_planes(np.random.default_rng(0), format, n, k // block.block_size)
    return jq.QuantizedArray.from_gguf_bytes(block.join(planes), format, (n, k))


def test_these_are_all_of_them():
    code_book_formats = {"IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS"}
    assert set(EIGHTS) == code_book_formats | {"NVFP4", "TQ1_0", "TQ2_0"}


@pytest.mark.parametrize("name", formats.names())
def test_golden_blocks(name):
    """ggml's blocks with chosen scales decode to the bits of ggml's values."""
    with np.load(GOLDEN / "formats" / "blocks" / f"{name}.npz") as data:
        raw, want = data["raw"], data["values"]
    block = formats.get(name)
    got = block.decode(block.split(raw)).reshape(want.shape)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    if name != "MXFP4":  # 12 * 2^126 is finite there, but not in float32
        np.testing.assert_array_equal(block.finite(block.split(raw)), np.isfinite(want).all(-1))


@pytest.mark.parametrize("format", EIGHTS)
def test_mat_vecs(format):
    """The tuned Config, and lanes with several groups of eight, for q8_1 and f32."""
    chosen = choose(matvec_rule, format, 3, 512, 1)
    assert chosen.lanes == 32
    for config, m in (
        (chosen, 1),
        (MatvecConfig(lanes=8, unroll=1, rows_per_warp=2), 3),
        (MatvecConfig(activations="f32", lanes=16), 2),
    ):
        planes = random_planes(
            np.random.default_rng(m), format, 3, 512 // formats.get(format).block_size
        )
        x = np.random.default_rng(0).standard_normal((m, 512), np.float32)
        operands, exact = activation_operands(config, x)
        (y,) = simulator.run(
            matvec(format=format, n=3, columns=512, m=m, config=config), *planes, *operands
        )
        assert nmse(y, exact @ weights(format, planes).T) <= 1e-12, config


@pytest.mark.parametrize("format", EIGHTS)
def test_native_products(format):
    """Few and many rows, int8 and floats; NVFP4's last span is partial."""
    k = 320 if format == "NVFP4" else 512
    w = packed(format, 21, k)
    exact = np.asarray(formats.get(format).decode(jax.tree.map(np.asarray, w.planes)), np.float64)
    for m, int8 in ((1, True), (5, True), (18, True), (3, False), (40, False)):
        x = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
        (y,) = calls.linear(jnp.asarray(x), [w], quantized=int8)
        seen = dequantized(*quantized(x)) if int8 else x.astype(np.float64)
        assert nmse(y, seen @ exact.T) <= 1e-10, (m, int8)
    rows = np.asarray(calls.embedding(jnp.array([20, 0], jnp.int32), w))
    np.testing.assert_array_equal(rows, exact[[20, 0]].astype(np.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("m", [2, 11])
def test_matmul_of_any_number_of_rows(implementation, m):
    """For more than eight rows, only the native kernels quantize to q8_1."""
    w = packed("IQ3_S", 6, 512)
    x = np.random.default_rng(m).standard_normal((m, 512)).astype(np.float32)
    with jq.implementation(implementation):
        y = jax.jit(jq.matmul)(x, w)
        rows = jq.embedding(jnp.array([5, 1]), w)
    exact = np.asarray(w.dequantize(), np.float64)
    is_quantized = implementation == "native" or (m <= 8 and implementation != "xla")
    seen = dequantized(*quantized(x)) if is_quantized else x
    assert nmse(y, seen @ exact.T) <= 1e-10
    np.testing.assert_array_equal(rows, exact[[5, 1]].astype(np.float32))


def test_tensor_cores_refuse():
    with pytest.raises(KernelError, match="IQ2_XS has no tensor-core product: its weights are de"):
        GemmConfig().check("IQ2_XS", 256)


def test_code_books_are_bytes_in_order():
    words = np.array(codebooks.words("IQ3_S"), "<u4").view(np.int8).reshape(512, 4)
    np.testing.assert_array_equal(words, codebooks.entries("IQ3_S"))
    raised = np.array(codebooks.words("IQ1_S", 8, 128), "<u4").view(np.uint8)
    np.testing.assert_array_equal(
        raised, (codebooks.entries("IQ1_S").astype(int) * 8 + 128).reshape(-1)
    )


@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_experts_that_many_choices_name(implementation):
    """Three tokens select an expert nine times: more int8 rows than all but native kernels take."""
    block = formats.get("IQ2_XXS")
    planes = random_planes(np.random.default_rng(0), "IQ2_XXS", 2 * 5, 1)
    w = jq.QuantizedArray.from_gguf_bytes(block.join(planes), "IQ2_XXS", (2, 5, 256))
    x = np.random.default_rng(1).standard_normal((3, 256)).astype(np.float32)
    ids = jnp.array([[1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 0]], jnp.int32)
    with jq.implementation(implementation):
        y = jax.jit(jq.expert_matmul)(x, w, ids)
    exact = np.asarray(w.dequantize(), np.float64)
    seen = dequantized(*quantized(x)) if implementation == "native" else x
    assert nmse(y, np.einsum("mk,mtnk->mtn", seen, exact[np.asarray(ids)])) <= 1e-10
