"""Attention followed by a product as one operation: results, kernels, and the unfused chain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import oracles
from support.helpers import nmse

import jax_q4k as jq

from .random_weights import random_weights

PAGE_SIZE, HEAD_DIM = 16, 128


def operands(
    batch, num_heads=6, num_kv_heads=1, per_sequence=2, head_dim=HEAD_DIM, format="Q4_K", n=40
):
    """Contexts of 1 to 2 pages; returns positional and keyword arguments."""
    rng = np.random.default_rng(batch)
    shape = (2 * batch + 1, num_kv_heads, PAGE_SIZE, head_dim)
    tables = np.zeros((batch, per_sequence), np.int32)
    tables[:, :2] = rng.permutation(2 * batch + 1)[: 2 * batch].reshape(batch, 2)
    k_pages, v_pages = (jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(2))
    given = (
        jnp.asarray(rng.standard_normal((batch, num_heads, head_dim), np.float32)),
        k_pages,
        v_pages,
        jnp.asarray(tables),
        jnp.asarray(rng.integers(1, 2 * PAGE_SIZE + 1, batch), jnp.int32),
        random_weights(format, n, num_heads * head_dim),
    )
    addends = dict(
        bias=rng.standard_normal(n, np.float32),
        residual=rng.standard_normal((batch, n), np.float32),
    )
    return given, addends


def chain(
    q,
    k_pages,
    v_pages,
    block_tables,
    context_lens,
    w,
    *,
    bias=None,
    residual=None,
    activations=None,
    **options,
):
    out = jq.paged_attention(q, k_pages, v_pages, block_tables, context_lens, **options)
    rest = dict(bias=bias, residual=residual, activations=activations)
    return jq.matmul(out.reshape(out.shape[0], -1), w, **rest)


@pytest.mark.parametrize("implementation", ["xla", "sim"])
def test_heads_of_512_dimensions(implementation):
    given, addends = operands(2, num_heads=4, head_dim=512)
    with jq.implementation(implementation):
        got = jax.jit(functools.partial(jq.paged_attention_matmul, activations="f32"))(
            *given, **addends
        )
        want = chain(*given, **addends, activations="f32")
    assert nmse(got, want) <= 1e-11


def test_latent_pages_are_refused():
    """Attention over latent rows is followed by another product, per head."""
    (q, pages, _, *others), _ = operands(2)
    with pytest.raises(TypeError, match="v_pages is of type NoneType; it must be a float array"):
        jq.paged_attention_matmul(q, pages, None, *others)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("implementation, tolerance", [("xla", 1e-11), ("sim", 1e-3)])
def test_equals_the_definition(implementation, tolerance, fused):
    """`sim` quantizes the activations."""
    given, addends = operands(2)
    options = dict(
        scale=0.2, window=20, soft_cap=3.0, sinks=np.linspace(-1, 1, 6, dtype=np.float32)
    )
    with jq.implementation(implementation, fused=fused):
        got = jax.jit(functools.partial(jq.paged_attention_matmul, **options))(*given, **addends)
    *pages, w = given
    want = oracles.attention(*map(np.asarray, pages), **options).reshape(2, -1)
    want = want @ np.asarray(w.dequantize(), np.float64).T + addends["bias"] + addends["residual"]
    assert got.shape == (2, 40) and got.dtype == jnp.float32
    assert nmse(got, want) <= tolerance


def launched(function, *args, fused=None, **kwargs):
    with jq.implementation(fused=fused):
        calls = jq.explain(function, *args, platform="cuda", **kwargs).calls
    return [kernel.family for call in calls for kernel in call.kernels * call.count]


@pytest.mark.slow("compiles a program for each case", quick=["per_sequence=2"])
@pytest.mark.parametrize("per_sequence", [2, 16])
def test_eight_rows_are_quantized_by_attention(per_sequence):
    """Bits equal the chain's with one launch less; long contexts are split over clusters."""
    given, addends = operands(8, 9, 1, per_sequence, head_dim=256, n=8)
    assert launched(jq.paged_attention_matmul, *given, **addends) == [
        "paged_attention",
        "gemm",
    ]
    apart = ["paged_attention", "quantize_q8_1", "gemm"]
    for fused in (False, ("matmul", "mlp")):
        found = launched(
            jq.paged_attention_matmul, *given, fused=fused, **({} if fused is False else addends)
        )
        assert found == apart
    with jq.implementation("sim"):
        got = jq.paged_attention_matmul(*given, **addends)
        np.testing.assert_array_equal(got, chain(*given, **addends))
    with jq.implementation("sim", fused=("matmul",)):
        np.testing.assert_array_equal(got, jq.paged_attention_matmul(*given, **addends))


def products(*args, **kwargs):
    """Type of the products that these operands take: int8 or f16."""
    (call,) = jq.explain(jq.paged_attention_matmul, *args, platform="cuda", **kwargs).calls
    return [k.arguments["config"].products for k in call.kernels if k.family == "gemm"]


@pytest.mark.slow("compiles a program for each case", quick=["batch=33-sizes1"])
@pytest.mark.parametrize(
    "batch, sizes",
    [
        (32, dict(num_heads=8, num_kv_heads=2, head_dim=128)),
        (33, dict(num_heads=8, num_kv_heads=2, head_dim=64, format="Q6_K")),
        (17, dict(num_heads=8, num_kv_heads=1, per_sequence=16)),  # a cluster
        (32, dict(num_heads=2, num_kv_heads=2, head_dim=256)),
    ],
)
def test_attention_leaves_f16_for_products_of_it(batch, sizes):
    """Bits equal the chain's, which needs another launch."""
    given, addends = operands(batch, n=16, **sizes)
    assert launched(jq.paged_attention_matmul, *given, **addends) == ["paged_attention", "gemm"]
    assert products(*given, **addends) == ["f16"]
    apart = launched(jq.paged_attention_matmul, *given, fused=("matmul",), **addends)
    assert apart == ["paged_attention", "quantize_f16", "gemm"]
    with jq.implementation("sim"):
        got = jq.paged_attention_matmul(*given, **addends)
        np.testing.assert_array_equal(got, chain(*given, **addends))
    *pages, w = given
    heads = oracles.attention(*map(np.asarray, pages), scale=pages[0].shape[-1] ** -0.5)
    want = heads.reshape(batch, -1) @ np.asarray(w.dequantize(), np.float64).T
    assert nmse(got, want + addends["bias"] + addends["residual"]) <= 1e-6


@pytest.mark.slow("compiles a program for each case", quick=["sizes1"])
@pytest.mark.parametrize(
    "sizes",
    [
        dict(num_heads=12, num_kv_heads=4, head_dim=64),  # three heads per block
        # a merge has one head
        dict(num_heads=2, num_kv_heads=1, head_dim=128, per_sequence=2048, batch=17),
    ],
)
def test_attention_leaves_q8_1_where_blocks_have_no_super_blocks(sizes):
    given, addends = operands(**{"batch": 32, "n": 16} | sizes)
    *attending, last = launched(jq.paged_attention_matmul, *given, **addends)
    assert "quantize_q8_1" not in attending and last == "gemm"
    assert products(*given, **addends) == ["int8"]
    with jq.implementation("sim"):
        got = jq.paged_attention_matmul(*given, **addends)
        want = chain(*given, **addends, activations="q8_1")
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow(
    "compiles a program for each case", quick=["sizes1-activations=None", "sizes3-f32"]
)
@pytest.mark.parametrize(
    "sizes, activations",
    [
        (dict(batch=1), None),  # the mat-vec quantizes by its own prologue
        # heads do not fill quantization groups
        (
            dict(batch=8, num_heads=44, num_kv_heads=4, head_dim=48, format="Q8_0"),
            None,
        ),
        (dict(batch=65), None),  # a chain of steps
        (dict(batch=8, num_heads=9, head_dim=256), "f32"),
    ],
)
def test_shapes_for_which_attention_leaves_floats(sizes, activations):
    given, addends = operands(n=8, **sizes)
    with jq.implementation("sim", activations=activations):
        got = jq.paged_attention_matmul(*given, **addends)
        np.testing.assert_array_equal(got, chain(*given, **addends))
    families = launched(jq.paged_attention_matmul, *given, activations=activations, **addends)
    one_launch = sizes["batch"] == 1 or activations == "f32"
    assert families[0] == "paged_attention" and (families[1:] == ["matvec"]) == one_launch


def test_only_configs_that_are_used_are_chosen():
    given, addends = operands(9, n=8)
    (call,) = jq.explain(jq.paged_attention_matmul, *given, platform="cuda", **addends).calls
    assert [choice.rule for choice in call.chosen if choice.config] == [
        "paged_attention",
        "fused_gemm",
    ]


def test_float_weights_and_no_rows():
    given, addends = operands(2)
    *pages, w = given
    floats = w.dequantize()
    with jq.implementation("xla"):
        got = jq.paged_attention_matmul(*pages, floats, **addends)
        assert (
            nmse(got, np.asarray(jq.paged_attention_matmul(*given, **addends), np.float64)) <= 1e-11
        )
    none = [a[:0] for a in (pages[0], *pages[3:])]
    assert jq.paged_attention_matmul(none[0], *pages[1:3], *none[1:], w).shape == (0, 40)


def test_vmap_runs_each_example():
    given, addends = operands(2)
    q, *rest = given
    both = jnp.stack([q, -q])
    got = jax.vmap(lambda q: jq.paged_attention_matmul(q, *rest, **addends))(both)
    for y, x in zip(got, both, strict=True):
        np.testing.assert_array_equal(y, jq.paged_attention_matmul(x, *rest, **addends))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            dict(w=jnp.zeros((4, 100))),
            ValueError,
            r"w has shape \(4, 100\); its k must be num_heads \* head_dim, 6 \* 128",
        ),
        (dict(w=jnp.zeros(4)), ValueError, r"w has shape \(4,\); it must have two axes \(n, k\)"),
        (dict(bias=np.zeros(3, np.float32)), ValueError, "bias has shape"),
        (dict(residual=np.zeros((3, 40), np.float32)), ValueError, "residual has shape"),
        (dict(q=jnp.zeros((2, 6, 64))), ValueError, "q has shape"),
        (dict(soft_cap=-1.0), ValueError, "soft_cap"),
        (dict(activations="int4"), ValueError, "activations='int4'"),
    ],
)
def test_bad_arguments_are_refused(change, error, message):
    given, addends = operands(2)
    names = ("q", "k_pages", "v_pages", "block_tables", "context_lens", "w")
    with pytest.raises(error, match=message):
        jq.paged_attention_matmul(**dict(zip(names, given, strict=True)) | addends | change)
