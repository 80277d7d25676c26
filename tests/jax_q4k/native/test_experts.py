"""Mixtures of experts with the CPU kernels, against float64, for all available instruction sets."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.format_lists import PRODUCTS
from support.helpers import nmse
from support.implementations import needs_native
from support.oracles import gated

import jax_q4k as jq
from jax_q4k import native
from jax_q4k.native import calls
from jax_q4k.selection import Selection, selected
from ptx_kernels import formats

from .test_products import activations, matrix, seen

EXPERTS = 6


def stack(format, n, k, seed=0):
    """Returns (packed, float64) matrices (EXPERTS, n, k); float types have ggml's names."""
    if format not in formats.names():
        dtype = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[format]
        w = jnp.asarray(activations(EXPERTS * n, k, seed) / np.sqrt(k), dtype)
        return w.reshape(EXPERTS, n, k), np.asarray(w, np.float64).reshape(EXPERTS, n, k)
    w, exact = matrix(format, EXPERTS * n, k, seed=seed)
    planes = jax.tree.map(lambda plane: plane.reshape(EXPERTS, n, *plane.shape[1:]), w)
    return planes, exact.reshape(EXPERTS, n, k)


def routes(m, top=3):
    """Ids and weights: experts with no, some and most tokens; some ids are out of range."""
    rng = np.random.default_rng(m)
    ids = rng.permuted(np.tile([0, 1, 1, 3, 3, 3, 5, 5, 5, 5], (m, 1)), axis=1)[:, :top]
    ids[1 % m, 0], ids[m - 1, top - 1] = -1, EXPERTS
    ids[m // 2, 1] = np.iinfo(np.int32).min
    return ids.astype(np.int32), rng.uniform(0.1, 1, (m, top)).astype(np.float32)


def products(x, w, ids):
    """Products in float64; x is (m, k) or (m, top, k); ids out of range give zeros."""
    x = np.broadcast_to(x if x.ndim == 3 else x[:, None], (*ids.shape, x.shape[-1]))
    known = (ids >= 0) & (ids < EXPERTS)
    chosen = w[np.where(known, ids, 0)]
    return np.where(known[..., None], np.einsum("mtnk,mtk->mtn", chosen, x), 0)


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("m", [1, 4, 60])
def test_the_experts_of_every_token(kernels, m, quantized):
    """An expert gets none of 60 tokens, up to one tile of rows, or more than 16."""
    k, inner, n = 256, 96, 33  # one row more than tasks of 16
    (gate, exact_gate), (up, exact_up) = stack("Q4_K", inner, k), stack("Q5_0", inner, k, 3)
    down, exact_down = stack("Q8_0", n, inner, 4)
    x, residual, norm = activations(m, k), activations(m, n), activations(1, k)[0]
    (ids, weights), scale = routes(m), activations(1, EXPERTS)[0]
    biases = [activations(EXPERTS, rows, 5 + rows) for rows in (inner, inner, n)]
    y = calls.expert_mlp(
        *map(jnp.asarray, (x, ids, weights)),
        (gate, up, down),
        quantized=(quantized, quantized),
        activation="gelu",
        biases=list(map(jnp.asarray, biases)),
        down_scale=jnp.asarray(scale),
        norm_weight=jnp.asarray(norm),
        eps=1e-5,
        residual=jnp.asarray(residual),
    )
    known = (ids >= 0) & (ids < EXPERTS)
    at = np.where(known, ids, 0)
    normalized = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, -1, keepdims=True) + 1e-5) * norm
    normalized = seen(normalized.astype(np.float32), quantized)
    g, u = (
        products(normalized, w, ids) + b[at]
        for w, b in zip((exact_gate, exact_up), biases, strict=False)
    )
    h = gated("gelu", g, u).astype(np.float32)
    h = seen(h.reshape(-1, inner), quantized).reshape(h.shape)
    each = products(h, exact_down, ids) * scale[at][..., None] + biases[2][at]
    want = residual + np.einsum("mtn,mt->mn", np.where(known[..., None], each, 0), weights)
    # rounding in the norm or in h may round an int8 the other way
    assert nmse(y, want) <= (1e-6 if quantized else 1e-10)


@pytest.mark.slow(
    "repeats for each format what others do for all of them",
    quick=["*Q4_K*", "*Q6_K*", "*MXFP4*", "*F16*"],
)
@pytest.mark.parametrize("format", [*formats.names(), "F32", "F16", "BF16"])
def test_every_type_of_matrix(format):
    k = 64 if format not in formats.names() else max(64, formats.get(format).block_size)
    w, exact = stack(format, 20, k)
    ids, _ = routes(30)
    for quantized in (False, True)[: 1 + (format in PRODUCTS)]:
        for x in (activations(30, k), activations(90, k)):
            y = calls.expert_matmul(jnp.asarray(x), jnp.asarray(ids), w, quantized=quantized)
            rows = seen(x, quantized).reshape(*([30, 3, k] if len(x) == 90 else [30, k]))
            assert nmse(y, products(rows, exact, ids)) <= 1e-10


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("m", [2, 40])
@pytest.mark.parametrize("quantized", [True, False])
def test_a_bad_activation_spoils_its_token_alone(kernels, value, m, quantized):
    w, _ = stack("Q4_K", 256, 256)
    x, (ids, weights) = activations(m, 256), routes(m)
    ids[:, 1] = 3  # shares the expert with other tokens
    clean, x[0, 77] = x.copy(), value
    got, want = (
        np.asarray(
            calls.expert_mlp(
                *map(jnp.asarray, (x, ids, weights)),
                (w, w, w),
                quantized=(quantized, quantized),
                activation="swiglu_oai",
            )
        )
        for x in (x, clean)
    )
    assert not np.isfinite(got[0]).any()
    np.testing.assert_array_equal(got[1:], want[1:])


@needs_native
def test_long_prompts_go_through_in_parts():
    """Splits 7000 tokens into three parts.

    Intermediate results are limited to 3 * 512 * 5461 floats.
    """
    k, n = 512, 16
    w, exact = stack("Q8_0", n, k)
    x = np.tile(activations(70, k), (100, 1))
    ids = np.tile(routes(70)[0], (100, 1))
    ids[6000:] = -1
    y = calls.expert_matmul(jnp.asarray(x), jnp.asarray(ids), w, quantized=False)
    want = np.tile(products(x[:70].astype(np.float64), exact, ids[:70]), (100, 1, 1))
    want[6000:] = 0
    assert nmse(y, want) <= 1e-10
    down, exact_down = stack("Q8_0", k, n * 2, 3)
    gate, exact_gate = stack("Q8_0", n * 2, k, 4)
    weights = np.ones(ids.shape, np.float32)
    y = calls.expert_mlp(
        *map(jnp.asarray, (x, ids, weights)),
        (gate, gate, down),
        quantized=(False, False),
        activation="silu",
        residual=jnp.asarray(x),
    )
    g = products(x[:70].astype(np.float64), exact_gate, ids[:70])
    sums = products(gated("silu", g, g), exact_down, ids[:70]).sum(axis=1)
    want = x + np.concatenate([np.tile(sums, (100, 1))[:6000], np.zeros((1000, k))])
    assert nmse(y, want) <= 1e-10


X, PLANE = np.zeros((2, 256), np.float32), np.zeros((3, 8, 1, 144), np.uint8)
IDS, WEIGHTS, DOWN = np.zeros((2, 2), np.int32), X[:, :2], np.zeros((3, 16, 8), np.float32)
MATMUL = dict(format="Q4_K", quantized=True, one_product=False)
MLP = dict(
    gate="Q4_K",
    up="Q4_K",
    down="F32",
    activation="silu",
    quantized=True,
    quantized_down=False,
    one_product=False,
    biases="000",
    down_scale=False,
    norm=False,
    eps=0.0,
    residual=False,
)


@needs_native
@pytest.mark.parametrize(
    "name, operands, changes, message",
    [
        ("expert_matmul", [X, IDS], {}, "w is missing"),
        ("expert_matmul", [X, WEIGHTS, PLANE], {}, "ids has an element type"),
        ("expert_matmul", [X[:, :128], IDS, PLANE], {}, "w of k=128 in blocks of 256"),
        ("expert_matmul", [X, IDS, PLANE[:, :, :, 1:]], {}, "w has shape"),
        ("expert_matmul", [X, IDS, PLANE[0]], {}, "w has shape"),
        ("expert_matmul", [X[:1], IDS, PLANE], {}, "x must have a row for each token"),
        ("expert_matmul", [X, IDS, DOWN], {"format": "F32"}, "w has shape"),
        ("expert_matmul", [X[:, :8], IDS, DOWN], {"format": "F32"}, "floats are multiplied as"),
        ("expert_matmul", [X, IDS, PLANE, X], {}, "too many operands"),
        ("expert_mlp", [X, IDS], {}, "weights is missing"),
        ("expert_mlp", [X, IDS[:1], WEIGHTS, PLANE, PLANE, DOWN], {}, "ids has shape"),
        ("expert_mlp", [X, IDS, WEIGHTS[:, :1], PLANE, PLANE, DOWN], {}, "weights has shape"),
        ("expert_mlp", [X, IDS, WEIGHTS, PLANE, PLANE[:2], DOWN], {}, "up has shape"),
        ("expert_mlp", [X, IDS, WEIGHTS, PLANE, PLANE[:, :7], DOWN], {}, "up has shape"),
        ("expert_mlp", [X, IDS, WEIGHTS, PLANE, PLANE, DOWN[:2]], {}, "down has shape"),
        ("expert_mlp", [X, IDS, WEIGHTS, PLANE, PLANE, DOWN[:, :, 1:]], {}, "down has shape"),
        ("expert_mlp", [X, IDS, WEIGHTS, PLANE, PLANE, DOWN], {"biases": "1"}, "which of three"),
        ("expert_mlp", [X, IDS, WEIGHTS, PLANE, PLANE, DOWN], {"biases": "010"}, "up's bias is"),
        ("expert_mlp", [X, IDS, WEIGHTS, PLANE, PLANE, DOWN], {"activation": "relu"}, "relu"),
        ("expert_mlp", [X, IDS, WEIGHTS, PLANE, PLANE, DOWN], {"residual": True}, "residual is"),
        ("expert_mlp", [X, IDS, WEIGHTS, PLANE, PLANE, DOWN], {"norm": True}, "norm_weight has"),
        ("expert_mlp", [X, IDS, WEIGHTS, PLANE, PLANE, DOWN], {"down_scale": True}, "down_scale"),
        (
            "expert_mlp",
            [X, IDS, WEIGHTS, PLANE, PLANE, DOWN],
            {"quantized_down": True},
            "floats are multiplied as",
        ),
    ],
)
def test_handlers_refuse_what_does_not_fit(name, operands, changes, message):
    shape, attributes = ((2, 2, 8), MATMUL) if name == "expert_matmul" else ((2, 16), MLP)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        struct = jax.ShapeDtypeStruct(shape, jnp.float32)
        native.call(name, [struct], *map(jnp.asarray, operands), **(attributes | changes))


@needs_native
def test_nothing_is_no_fault():
    given = jnp.asarray(X), jnp.full_like(jnp.asarray(IDS), -1), jnp.asarray(WEIGHTS)
    packed = jq.QuantizedArray("Q4_K", (3, 8, 256), (jnp.asarray(PLANE),))
    options = {"quantized": (True, False), "activation": "silu"}
    for m in (0, 2):
        x, ids, weights = (a[:m] for a in given)
        y = calls.expert_mlp(x, ids, weights, (packed, packed, jnp.asarray(DOWN)), **options)
        assert y.shape == (m, 16) and not np.asarray(y).any()
        assert not np.asarray(calls.expert_matmul(x, ids, packed, quantized=True)).any()


@needs_native
@pytest.mark.parametrize("quantized", ["f32", "q8_1"])
def test_bits_do_not_depend_on_other_tokens_in_a_deterministic_engine(kernels, quantized):
    """An expert has 1 to 60 tokens, which are one and several tiles of rows."""
    gate, down = stack("Q4_K", 256, 256)[0], stack("Q8_0", 33, 256, 4)[0]
    x, (ids, weights) = activations(60, 256), routes(60)

    @jax.jit
    def run(*of_tokens):
        x, ids, weights = of_tokens
        y = jq.expert_mlp(x, gate, gate, down, ids, weights)
        return y, jq.expert_matmul(x, gate, ids)

    with selected(Selection("native", quantized, batch_invariant=True)):
        whole = run(x, ids, weights)
        for size in (1, 5, 20):
            for first in range(0, 60, size):
                part = slice(first, first + size)
                for got, want in zip(run(x[part], ids[part], weights[part]), whole, strict=True):
                    assert (np.asarray(got) == np.asarray(want)[part]).all()


@needs_native
def test_a_router_has_the_same_bits_for_any_number_of_tokens():
    logits = jnp.asarray(3 * activations(67, 24))
    bias, options = jnp.asarray(activations(1, 24)[0]), dict(groups=4, groups_used=2, scale=2.5)
    for extra in ({}, {"bias": bias, "gating": "sigmoid"} | options):
        run = jax.jit(functools.partial(jq.route, top=5, **extra))
        whole = run(logits)
        for size in (1, 3, 16, 64):
            for got, want in zip(run(logits[:size]), whole, strict=True):
                assert (np.asarray(got) == np.asarray(want)[:size]).all()


@needs_native
@pytest.mark.parametrize(
    "columns, changes, message",
    [
        ((13, 13), {}, "ids must have 1 to 12 columns"),
        ((7, 7), {"groups": 4, "groups_used": 2}, "ids must have 1 to 6 columns"),
        ((2, 3), {}, "weights has shape"),
        ((2, 2), {"groups": 5}, "the groups do not fit"),
        ((2, 2), {"groups": 0}, "the groups do not fit"),
        ((2, 2), {"groups": 3, "groups_used": 4}, "the groups do not fit"),
        ((2, 2), {"bias": True}, "bias is missing"),
    ],
)
def test_a_router_refuses_what_does_not_fit(columns, changes, message):
    attributes = dict(softmax=True, bias=False, groups=1, groups_used=1, normalize=True)
    attributes |= dict(least_sum=0.0, scale=1.0) | changes
    types = zip(columns, (jnp.int32, jnp.float32), strict=True)
    structs = [jax.ShapeDtypeStruct((2, count), dtype) for count, dtype in types]
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(native.call("route", structs, jnp.zeros((2, 12)), **attributes))
