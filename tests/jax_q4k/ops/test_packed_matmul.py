"""Products with packed weights on CUDA: the number of launches, and the bits of each variant."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.format_lists import FEW_ARE_QUICK, PRODUCTS
from support.helpers import nmse

import jax_q4k as jq
from jax_q4k.custom_call import launch_simulated
from jax_q4k.ops import gemv, quantize_q8_1
from ptx_kernels import formats, tuning
from ptx_kernels.kernels.matvec import fused_matvec_rule
from ptx_kernels.tuning import choose

from .random_weights import random_weights

rng = np.random.default_rng(0)


def launches(function, *operands):
    """Families of the kernels that a call launches on CUDA."""
    found = jq.explain(function, *operands, platform="cuda")
    return [kernel.family for call in found.calls for kernel in call.kernels * call.count]


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("activations", [None, "q8_1", "f32"])
def test_one_row_is_one_launch(activations, fused):
    x, w = np.ones((1, 512), np.float32), random_weights("Q4_K", 64, 512)
    product = jq.implementation(activations=activations, fused=fused)(jq.matmul)
    assert launches(product, x, w) == ["matvec"]


def test_rows_that_every_block_would_quantize_for_long_are_quantized_once():
    x, w = np.ones((2, 14336), np.float32), random_weights("Q4_K", 16, 14336)
    assert launches(jq.matmul, x, w) == ["quantize_q8_1", "matvec"]


@pytest.mark.parametrize(
    ("format", "rows", "columns", "family"),
    [
        ("Q4_K", 3, 4096, "matvec"),
        ("Q4_K", 4, 2048, "gemm"),
        ("Q6_K", 8, 1024, "gemm"),
        ("Q4_K", 8, 512, "matvec"),  # activations that its blocks quantize
        ("Q4_K", 9, 512, "gemm"),
        ("Q8_0", 8, 1056, "matvec"),  # columns that tensor cores do not take
        ("IQ2_XS", 8, 1024, "matvec"),  # a format that they do not take
    ],
)
def test_tensor_cores_take_over_from_mat_vecs(format, rows, columns, family):
    x, w = np.ones((rows, columns), np.float32), random_weights(format, 32, columns)
    assert launches(jq.matmul, x, w)[-1] == family
    if rows <= 8:
        assert launches(jq.implementation(activations="f32")(jq.matmul), x, w) == ["matvec"]


@pytest.mark.slow("compiles a program for each case", quick=["rows=3-Q4_0"])
@pytest.mark.grid
@pytest.mark.parametrize("format", PRODUCTS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_mat_vec_that_quantizes_has_the_bits_of_one_that_is_given_q8_1(format, rows):
    """The Configs are otherwise equal, so sums have the same order."""
    x, w = (
        jnp.asarray(rng.standard_normal((rows, 512)), jnp.float32),
        random_weights(format, 24, 512),
    )
    config = choose(fused_matvec_rule, (format,), (24,), 512, rows, True)
    assert config.activations == "inline_q8"
    ahead = dataclasses.replace(config, activations="q8_1")

    def product(config, given):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tuning, "choose", lambda *_, **__: config)
            return gemv.gemv(launch_simulated, given, [w])[0]

    inline = jax.jit(functools.partial(product, config))(x)
    given = jax.jit(functools.partial(product, ahead))(quantize_q8_1.reference(x))
    np.testing.assert_array_equal(inline, given)
    np.testing.assert_array_equal(inline, jq.implementation("sim")(jq.matmul)(x, w))


@FEW_ARE_QUICK
@pytest.mark.grid
@pytest.mark.parametrize("format", PRODUCTS)
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_f32_mat_vecs_are_exact(format, rows):
    """One to eight rows of unquantized activations times packed weights: no int8, no tf32."""
    k = 768 if formats.get(format).block_size == 256 else 736
    x, w = rng.standard_normal((rows, k)).astype(np.float32), random_weights(format, 19, k)
    with jq.implementation("sim", activations="f32"):
        got = jq.matmul(x, w)
    want = x.astype(np.float64) @ np.asarray(w.dequantize(), np.float64).T
    assert nmse(got, want) <= 1e-12


def test_a_norm_of_rows_beyond_shared_memory_is_a_launch_of_its_own():
    """A mat-vec normalizes f32 rows only if they fit in its block's shared memory.

    Other rows are normalized by a separate launch.
    """

    def product(x, norm, w):
        return jq.rms_norm_matmul(x, norm, w, eps=1e-5, activations="f32")

    k, w = 4096, random_weights("Q4_K", 5, 4096)
    norm = np.linspace(0.5, 2, k, dtype=np.float32)
    few, many = (rng.standard_normal((rows, k)).astype(np.float32) for rows in (2, 6))
    assert launches(product, few, norm, w) == ["matvec"]
    assert launches(product, many, norm, w) == ["rms_norm", "matvec"]
    for x in (few, many):
        with jq.implementation("sim"):
            got = product(x, norm, w)
        h = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, -1, keepdims=True) + 1e-5) * norm
        assert nmse(got, h @ np.asarray(w.dequantize(), np.float64).T) <= 1e-11
