"""The same operations in plain JAX and with simulated PTX kernels, under jit and control flow.

The selection between them is tested, too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.format_lists import FEW_ARE_QUICK, PRODUCTS
from support.helpers import nmse
from support.implementations import IMPLEMENTATIONS, needs_native
from support.oracles import random_planes

import jax_q4k as jq
from jax_q4k import custom_call
from jax_q4k.ops import backends
from jax_q4k.ops.causal_attention import causal_attention
from ptx_kernels import formats
from ptx_kernels.kernels.quantize_q8_1 import quantize_q8_1

FORMATS = PRODUCTS


def packed(format: str, n: int, k: int, seed: int = 0) -> jq.QuantizedArray:
    blocks = k // formats.get(format).block_size
    planes = random_planes(np.random.default_rng(seed), format, n, blocks)
    return jq.QuantizedArray(format, (n, k), tuple(map(jnp.asarray, planes)))


def normal(*shape: int, seed: int = 0, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.grid
@pytest.mark.parametrize("rows", [1, 3, 8, 9])
@pytest.mark.parametrize("format", FORMATS)
def test_matmul(format: str, rows: int) -> None:
    x, w = normal(rows, 512), packed(format, 37, 512)
    simulated = jq.implementation("sim")(jq.matmul)(x, w)
    assert nmse(simulated, jq.implementation("xla")(jq.matmul)(x, w, activations="q8_1")) <= 1e-11
    assert nmse(simulated, x @ w.dequantize().T) <= 1e-3
    simulated, plain = (
        jq.implementation(name)(jq.matmul)(x, w, activations="f32") for name in ("sim", "xla")
    )
    assert nmse(simulated, plain) <= 1e-11


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_matmul_of_16_bit_activations(dtype) -> None:
    x, w = normal(2, 256, dtype=dtype), packed("Q4_K", 5, 256)
    simulated = jq.implementation("sim")(jq.matmul)(x, w)
    assert simulated.dtype == dtype
    # both round to 16 bits
    assert nmse(simulated, jq.implementation("xla")(jq.matmul)(x, w, activations="q8_1")) <= 1e-5


def test_matmul_with_leading_axes() -> None:
    x, w = normal(2, 3, 256), packed("Q6_K", 10, 256)
    simulated = jq.implementation("sim")(jq.matmul)(x, w)
    assert simulated.shape == (2, 3, 10)
    assert nmse(simulated, jq.implementation("xla")(jq.matmul)(x, w, activations="q8_1")) <= 1e-11


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_non_finite_value_spoils_only_its_row(implementation: str, bad: float) -> None:
    x = normal(3, 256).at[1, 100].set(bad)
    y = jq.implementation(implementation)(jq.matmul)(x, packed("Q4_K", 6, 256))
    assert not jnp.isfinite(y[1]).any() and jnp.isfinite(y[jnp.array([0, 2])]).all()


@FEW_ARE_QUICK
@pytest.mark.grid
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("format", FORMATS)
def test_dequantize_and_embedding(format: str, dtype) -> None:
    w = packed(format, 9, 256)
    ids = jnp.array([[3, 8], [-1, 9]])
    for call in (jq.dequantize, lambda *args, **options: jq.embedding(ids, *args, **options)):
        got, want = (jq.implementation(name)(call)(w, dtype) for name in ("sim", "xla"))
        assert got.dtype == dtype
        # NaN rows are equal
        np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))


def test_quantize_q8_1() -> None:
    x = normal(2, 3, 96)
    for got, want in zip(
        *(jq.implementation(name)(jq.quantize_q8_1)(x) for name in ("sim", "xla")), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_loop_that_decodes(implementation: str) -> None:
    """append_kv and paged_attention inside a jitted while_loop with a donated cache.

    The reference is attention in float64.
    """
    heads, kv_heads, dim, steps = 4, 2, 32, 20
    q, k, v = (normal(steps, h, dim, seed=i) for i, h in enumerate((heads, kv_heads, kv_heads)))
    tables = jnp.array([[2, 0]], jnp.int32)

    def loop(pages, q, k, v):
        def step(carry):
            t, pages, out = carry
            slot = tables[0, t // 16] * 16 + t % 16
            pages = jq.append_kv(*pages, k[t][None], v[t][None], slot[None])
            row = jq.paged_attention(q[t][None], *pages, tables, (t + 1)[None])
            return t + 1, pages, out.at[t].set(row[0])

        return jax.lax.while_loop(
            lambda c: c[0] < steps, step, (jnp.int32(0), pages, jnp.zeros_like(q))
        )[2]

    pages = (jnp.full((3, kv_heads, 16, dim), jnp.nan),) * 2
    with jq.implementation(implementation):
        out = np.asarray(jax.jit(loop)(pages, q, k, v), np.float64)
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    for t in range(steps):
        for h in range(heads):
            scores = k[: t + 1, h // 2] @ q[t, h] * dim**-0.5
            p = np.exp(scores - scores.max())
            assert nmse(out[t, h], p @ v[: t + 1, h // 2] / p.sum()) <= 1e-11


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scan_over_stacked_weights(implementation: str) -> None:
    layers = [packed("Q4_K", 256, 256, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *planes: jnp.stack(planes), *layers)
    x = normal(2, 256)
    with jq.implementation(implementation, activations="f32"):
        y, _ = jax.jit(lambda x, w: jax.lax.scan(lambda x, w: (jq.matmul(x, w), None), x, w))(
            x, stacked
        )
    want = x.astype(jnp.float32)
    for w in layers:
        want = jnp.dot(want, w.dequantize().T, precision="highest")
    assert nmse(y, want) <= 1e-11


def test_a_jitted_function_is_traced_again_under_another_choice() -> None:
    x, w = normal(1, 256), packed("Q4_K", 4, 256)
    f = jax.jit(lambda x, w: jq.matmul(x, w))
    outer = f(x, w)
    with jq.implementation("sim"):
        simulated = f(x, w)
        with jq.implementation("xla"):
            exact = f(x, w)
        np.testing.assert_array_equal(f(x, w), simulated)
    np.testing.assert_array_equal(f(x, w), outer)
    assert 1e-9 < nmse(simulated, exact) < 1e-3  # int8 activations, so it is another path


def test_choices_that_cannot_be() -> None:
    x, w = normal(1, 256), packed("Q4_K", 4, 256)
    with pytest.raises(jq.UnavailableError, match="implementation 'ptx' needs a CUDA device"):
        jq.implementation("ptx")(jq.matmul)(x, w)
    with pytest.raises(
        ValueError, match="implementation='cuda' must be one of ptx, native, xla, sim"
    ):
        jq.implementation("cuda")(jq.matmul)(x, w)
    with pytest.raises(ValueError, match="activations='int8' must be one of f32, q8_1"):
        jq.matmul(x, w, activations="int8")
    with pytest.raises(ValueError, match="implementation='gpu'"), jq.implementation("gpu"):
        pass
    lowering = jax.jit(lambda x, w: jq.implementation("sim")(jq.matmul)(x, w)).trace(x, w)
    with pytest.raises(jq.UnavailableError, match="'sim' runs on the CPU only"):
        lowering.lower(lowering_platforms=("cuda",))


def test_an_operation_asks_before_the_context() -> None:
    x, w = normal(1, 256), packed("Q4_K", 4, 256)
    with jq.implementation("sim"):
        np.testing.assert_array_equal(
            jq.implementation("xla")(jq.matmul)(x, w, activations="f32"),
            jq.implementation("xla")(jq.matmul)(x, w),
        )
        with pytest.raises(jq.UnavailableError, match="needs a CUDA device"):
            jq.implementation("ptx")(jq.matmul)(x, w)


@pytest.mark.parametrize("launch", [custom_call.launch_ptx, custom_call.launch_simulated])
def test_a_kernel_takes_its_own_operands_alone(launch) -> None:
    kernel = quantize_q8_1(rows=2, columns=64)
    for wrong in ([normal(2, 32)], [normal(2, 64, dtype=jnp.bfloat16)], [], [normal(2, 64)] * 2):
        with pytest.raises(
            TypeError,
            match=r"kernel quantize_q8_1 takes \[\(\(2, 64\), dtype\('float32'\)\)\], got",
        ):
            jax.eval_shape(lambda *operands: launch(kernel, *operands), *wrong)


def test_products_on_a_gpu_are_no_tf32() -> None:
    """Products use all bits of float32; XLA's default on a GPU has ten bits of mantissa."""
    x, w = jnp.zeros((9, 256)), packed("Q4_K", 4, 256)
    q, pages, tables = (
        jnp.zeros((1, 2, 32)),
        jnp.zeros((2, 2, 16, 32)),
        jnp.zeros((1, 2), jnp.int32),
    )
    programs = [
        (lambda x: jq.matmul(x, w, activations="f32"), x),
        (lambda x: jq.implementation("xla")(jq.matmul)(x, w), x),
        (
            lambda q: jq.implementation("xla")(jq.paged_attention)(
                q, pages, pages, tables, tables[:, 0]
            ),
            q,
        ),
        (
            lambda q: jq.implementation("xla")(causal_attention)(
                q[None], q[None], q[None], jnp.array([1])
            ),
            q,
        ),
    ]
    for program, argument in programs:
        text = jax.jit(program).trace(argument).lower(lowering_platforms=("cuda",)).as_text()
        products = [line for line in text.splitlines() if "dot_general" in line]
        assert products and all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def test_lowered_for_cuda_updates_the_pages_in_place() -> None:
    pages = jax.ShapeDtypeStruct((4, 2, 16, 64), jnp.float32)
    new, slots = (
        jax.ShapeDtypeStruct((3, 2, 64), jnp.float32),
        jax.ShapeDtypeStruct((3,), jnp.int32),
    )
    text = (
        jax.jit(jq.append_kv)
        .trace(pages, pages, new, new, slots)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert text.count("__gpu$xla.gpu.ptx") == 1
    assert text.count("#stablehlo.output_operand_alias<") == 2


def test_every_implementation_has_a_backend() -> None:
    assert tuple(backends.BACKENDS) == jq.IMPLEMENTATIONS


@needs_native
def test_the_cpus_kernels_are_its_default() -> None:
    found = jq.explain(jq.matmul, normal(1, 256), packed("Q4_K", 8, 256), platform="cpu")
    assert [(call.implementation, call.why) for call in found.calls] == [
        ("native", "the default on cpu")
    ]
    text = jax.jit(jq.matmul).lower(normal(1, 256), packed("Q4_K", 8, 256)).as_text()
    assert "jax_q4k_linear" in text
