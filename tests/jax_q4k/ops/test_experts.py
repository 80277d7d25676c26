"""`expert_matmul` and `expert_mlp` against float64, with every implementation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import IMPLEMENTATIONS, NATIVE
from support.oracles import dequantized, gated, quantized, rms_norm_oracle

import jax_q4k as jq

from .random_weights import random_weights

EXPERTS, K, INNER, N, TOP = 6, 256, 256, 24, 3
EPS = 1e-5
rng = np.random.default_rng(0)


def stack(format, n, k, seed):
    w = random_weights(format, EXPERTS * n, k, seed)
    return jax.tree.map(lambda plane: plane.reshape(EXPERTS, n, *plane.shape[1:]), w)


@functools.cache
def matrices():
    return stack("Q4_K", INNER, K, 1), stack("Q5_K", INNER, K, 2), stack("Q6_K", N, INNER, 3)


def normal(*shape):
    return rng.standard_normal(shape, np.float32)


BIASES = normal(EXPERTS, INNER), normal(EXPERTS, INNER), normal(EXPERTS, N)
SCALE, NORM = normal(EXPERTS), normal(K)
OPTIONS = {
    "activation": "swiglu_oai",
    "biases": BIASES,
    "down_scale": SCALE,
    "norm_weight": NORM,
    "eps": EPS,
}


def routes(m):
    """Ids, some out of range, and weights."""
    ids = np.argsort(rng.random((m, EXPERTS)), axis=1)[:, :TOP].astype(np.int32)
    ids[0, 0], ids[m // 2, 1], ids[m - 1, 2] = -1, EXPERTS, 2**31 - 1
    return ids, rng.uniform(0.1, 1, (m, TOP)).astype(np.float32)


def products(x, w, ids):
    x = np.broadcast_to(x if x.ndim == 3 else x[:, None], (*ids.shape, x.shape[-1]))
    return np.einsum("mtnk,mtk->mtn", w[np.clip(ids, 0, EXPERTS - 1)], x)


def exact(x, ids, weights, residual, seen=lambda x: x.astype(np.float64)):
    """Computes the network in float64 with OPTIONS; `seen` rounds activations."""
    at = np.clip(ids, 0, EXPERTS - 1)
    gate, up, down = (np.asarray(w.dequantize(), np.float64) for w in matrices())
    x = seen(rms_norm_oracle(x, NORM, EPS).astype(np.float32))
    g, u = (products(x, w, at) + b[at] for w, b in zip((gate, up), BIASES, strict=False))
    h = gated("swiglu_oai", g, u).astype(np.float32)
    h = seen(h.reshape(-1, INNER)).reshape(h.shape)
    y = products(h, down, at) * SCALE[at][..., None] + BIASES[2][at]
    return residual + np.einsum("mtn,mt->mn", y, np.where(at == ids, weights, 0))


@pytest.mark.grid
@pytest.mark.parametrize("activations", ["f32", "q8_1"])
@pytest.mark.parametrize("m", [1, 3, 40])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_network_is_that_of_float64(implementation, m, activations):
    x, residual, (ids, weights) = normal(m, K), normal(m, N), routes(m)
    with jq.implementation(implementation, activations=activations):
        y = jq.expert_mlp(x, *matrices(), ids, weights, residual=residual, **OPTIONS)
    rounded = {"seen": lambda x: dequantized(*quantized(x))} if activations == "q8_1" else {}
    want = exact(x, ids, weights, residual, **rounded)
    assert nmse(y, want) <= (1e-6 if rounded else 1e-11)


@pytest.mark.slow("compiles programs of several sizes", quick=["native"])
@pytest.mark.parametrize("implementation", ["xla", NATIVE])
def test_steps_are_the_whole(implementation):
    x, (ids, weights) = normal(7, K), routes(7)
    calls = [jq.implementation(implementation, activations="f32", fused=f) for f in (None, False)]
    both = []
    for selected in calls:
        with selected:
            both.append(jq.expert_mlp(x, *matrices(), ids, weights, **OPTIONS))
    assert nmse(*both) <= 1e-12


@pytest.mark.slow("compiles a program for each case", quick=["native"])
@pytest.mark.parametrize("implementation", ["xla", NATIVE])
def test_floats_and_packed_matrices_go_together(implementation):
    gate, up, down = matrices()
    x, (ids, weights) = normal(5, K).astype(jnp.bfloat16), routes(5)
    floats = gate.dequantize(jnp.bfloat16), up, down.dequantize(jnp.float16)
    same = floats[0].astype(jnp.float32), up, floats[2].astype(jnp.float32)
    with jq.implementation(implementation, activations="f32"):
        y = jq.expert_mlp(x, *floats, ids, weights)
        want = jq.expert_mlp(x.astype(jnp.float32), *same, ids, weights)
    assert y.dtype == jnp.bfloat16 and y.shape == (5, N)
    assert nmse(y, want) <= 1e-5


@pytest.mark.slow("compiles a program for each case", quick=["native"])
@pytest.mark.parametrize("implementation", ["xla", NATIVE])
def test_leading_axes_are_those_of_the_tokens(implementation):
    x, (ids, weights) = normal(6, K), routes(6)
    gate, *_ = matrices()
    with jq.implementation(implementation):
        flat = jq.expert_mlp(x, *matrices(), ids, weights)
        y = jq.expert_mlp(
            *(x.reshape(2, 3, K), *matrices()), *(a.reshape(2, 3, TOP) for a in (ids, weights))
        )
        np.testing.assert_array_equal(y.reshape(6, N), flat)
        one = jq.expert_mlp(x[2], *matrices(), ids[2], weights[2])
        assert one.shape == (N,) and nmse(one, flat[2]) <= 1e-12
        each = jq.expert_matmul(x.reshape(2, 3, K), gate, ids.reshape(2, 3, TOP))
        rows = np.broadcast_to(x[:, None], (6, TOP, K)).reshape(2, 3, TOP, K)
        np.testing.assert_array_equal(each, jq.expert_matmul(rows, gate, ids.reshape(2, 3, TOP)))
    assert each.shape == (2, 3, TOP, INNER) and not np.asarray(each)[0, 0, 0].any()
    none = jq.expert_mlp(x[:0], *matrices(), ids[:0], weights[:0], residual=normal(0, N))
    assert none.shape == (0, N)


@pytest.mark.slow("compiles a program for each case", quick=["native"])
@pytest.mark.parametrize("implementation", ["xla", NATIVE])
def test_experts_that_no_token_has_may_hold_anything(implementation):
    """Unused experts hold NaN in matrices, biases and scales.

    A NaN in a routing weight affects only its token.
    """
    gate, up, down = (w.dequantize() for w in matrices())
    x, (ids, weights) = normal(8, K), routes(8)
    ids[ids == 2] = -1
    options = {"biases": BIASES, "down_scale": SCALE, "activations": "f32"}
    with jq.implementation(implementation):
        want = jq.expert_mlp(x, gate, up, down, ids, weights, **options)
        spoil = [jnp.asarray(a).at[2].set(jnp.nan) for a in (gate, up, down, *BIASES, SCALE)]
        gate, up, down, *biases, scale = spoil
        options = {"biases": biases, "down_scale": scale, "activations": "f32"}
        np.testing.assert_array_equal(
            jq.expert_mlp(x, gate, up, down, ids, weights, **options), want
        )
        weights[0, 0], weights[1] = np.nan, np.nan  # the first belongs to no expert
        got = jq.expert_mlp(x, gate, up, down, ids, weights, **options)
    assert np.isnan(np.asarray(got)[1]).all()
    np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(want, 1, 0))


@pytest.mark.slow("compiles a program for each case")
def test_gradients_are_those_of_float64():
    """Gradients in x, routing weights, residual, biases, scales and float matrices."""
    given = [normal(5, K), normal(5, N), *BIASES, SCALE, NORM]
    gate, up, down = (np.asarray(w.dequantize()) for w in matrices())
    ids, weights = routes(5)

    def network(moving, function):
        x, residual, gb, ub, db, scale, norm, weights, *ws = moving
        options = {"biases": (gb, ub, db), "down_scale": scale, "norm_weight": norm}
        return jnp.sum(jnp.sin(function(x, *ws, ids, weights, residual=residual, **options)))

    def oracle(x, gate, up, down, ids, weights, *, biases, down_scale, norm_weight, residual):
        at = np.clip(ids, 0, EXPERTS - 1)
        x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + EPS) * norm_weight
        g, u = (jnp.einsum("mtnk,mk->mtn", w[at], x) for w in (gate, up))
        h = jax.nn.silu(g + biases[0][at]) * (u + biases[1][at])
        y = jnp.einsum("mtnk,mtk->mtn", down[at], h) * down_scale[at][..., None] + biases[2][at]
        return residual + jnp.einsum("mtn,mt->mn", y, jnp.where(at == ids, weights, 0))

    moving = [*given, weights, gate / 16, up / 16, down / 64]
    run = functools.partial(jq.expert_mlp, eps=EPS, activations="f32")
    got = jax.jit(jax.grad(lambda m: network(m, run)))(moving)
    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) for a in moving]
        want = jax.device_get(jax.jit(jax.grad(lambda m: network(m, oracle)))(wide))
    for a, b in zip(got, want, strict=True):
        assert np.any(b != 0) and nmse(a, b) <= 1e-9


@pytest.mark.slow("compiles derivatives")
@pytest.mark.parametrize("name", ["expert_mlp", "expert_matmul"])
def test_a_quantized_forward_pass_has_the_derivative_of_floats(name):
    x, (ids, weights) = normal(4, K), routes(4)
    gate, up, down = matrices()

    def loss(x, activations):
        if name == "expert_matmul":
            return jnp.sum(jq.expert_matmul(x, gate, ids, activations=activations))
        return jnp.sum(jq.expert_mlp(x, gate, up, down, ids, weights, activations=activations))

    exactly, rounded = (jax.grad(loss)(x, a) for a in ("f32", "q8_1"))
    assert nmse(rounded, exactly) <= (1e-12 if name == "expert_matmul" else 1e-3)
    transposed = jax.linear_transpose(
        lambda x: jq.expert_matmul(x, gate, ids, activations="q8_1"), x
    )
    (back,) = transposed(jnp.ones((4, TOP, INNER)))
    floats = jax.grad(lambda x: jnp.sum(jq.expert_matmul(x, gate, ids, activations="f32")))(x)
    assert nmse(back, floats) <= 1e-12


def test_memory_holds_one_decoded_matrix():
    """Plain JAX with 512 tokens and 128 experts: decoding all of them would take 2.4 GB."""
    shapes = [("Q4_K", 768, 2048), ("Q4_K", 768, 2048), ("Q6_K", 2048, 768)]
    weights = [
        jq.QuantizedArray.tree_unflatten(
            f,
            [
                jax.ShapeDtypeStruct((128, n, k // 256, plane.bytes_per_block), jnp.uint8)
                for plane in jq.formats.get(f).planes
            ],
        )
        for f, n, k in shapes
    ]
    x, ids = (jax.ShapeDtypeStruct((512, 2048), jnp.float32), (512, 8))
    routed = (jax.ShapeDtypeStruct(ids, jnp.int32), jax.ShapeDtypeStruct(ids, jnp.float32))
    with jq.implementation("xla"):
        compiled = jax.jit(jq.expert_mlp).lower(x, *weights, *routed).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 400 << 20


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"ids": np.zeros((4, 0), int)}, ValueError, "ids has shape \\(4, 0\\)"),
        ({"ids": np.zeros((3, 2), int)}, ValueError, "ids has shape \\(3, 2\\); it must be"),
        ({"ids": np.zeros((4, 3))}, TypeError, "ids has dtype float64; it must hold integers"),
        ({"weights": np.zeros((4, 2), np.float32)}, ValueError, "weights has shape \\(4, 2\\)"),
        ({"weights": np.zeros((4, 3), int)}, TypeError, "weights has dtype int"),
        ({"x": np.zeros((4, 128), np.float32)}, ValueError, "its last axis must be k=256"),
        ({"gate": np.zeros((INNER, K), np.float32)}, ValueError, "three axes \\(experts, n, k\\)"),
        ({"gate": np.zeros((EXPERTS, 0, K), np.float32)}, ValueError, "gate .* none of them empty"),
        ({"gate": np.zeros((0, INNER, K), np.float32)}, ValueError, "gate .* none of them empty"),
        ({"up": np.zeros((EXPERTS, 8, K), np.float32)}, ValueError, "up has shape .* gate's shape"),
        ({"down": np.zeros((5, N, INNER), np.float32)}, ValueError, "down has shape \\(5, 24, 256"),
        ({"down": 3}, TypeError, "down has dtype int32"),
        ({"biases": (None, None)}, ValueError, "biases has 2 elements"),
        ({"biases": (None, None, NORM)}, ValueError, "biases\\[2\\] has shape \\(256,\\)"),
        ({"down_scale": NORM}, ValueError, "down_scale has shape \\(256,\\)"),
        ({"activation": "relu"}, ValueError, "activation='relu' must be one of silu, gelu, swi"),
        ({"norm_weight": NORM}, ValueError, "eps=None must be a number"),
        ({"residual": np.zeros((4, K), np.float32)}, ValueError, "residual has shape \\(4, 256\\)"),
        ({"activations": "int4"}, ValueError, "activations='int4' must be one of f32, q8_1"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    gate, up, down = matrices()
    given = {"x": normal(4, K), "gate": gate, "up": up, "down": down}
    given |= dict(zip(("ids", "weights"), routes(4), strict=True)) | change
    with pytest.raises(error, match=message):
        jq.expert_mlp(**given)


@pytest.mark.parametrize("shape", [(4, TOP + 1, K), (3, K), (2, 4, TOP, K), (K,)])
def test_rows_must_be_those_of_the_ids(shape):
    with pytest.raises(ValueError, match="it must be \\(..., k\\) or \\(..., top, k\\)"):
        jq.expert_matmul(normal(*shape), matrices()[0], routes(4)[0])


@pytest.mark.parametrize("implementation", ["xla", NATIVE])
def test_columns_that_no_int8_product_takes_stay_floats(implementation):
    w, x, (ids, _) = stack("Q8_0", N, 96, 1), normal(9, 96), routes(9)
    with jq.implementation(implementation, activations="q8_1"):
        y = jq.expert_matmul(x, w, ids)
    inside = (ids >= 0) & (ids < EXPERTS)
    want = products(x.astype(np.float64), np.asarray(w.dequantize(), np.float64), ids)
    assert nmse(np.asarray(y)[inside], want[inside]) <= 1e-11
