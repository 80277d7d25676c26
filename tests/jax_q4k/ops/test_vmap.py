"""Operations under `vmap` against one call per example, and derivatives through it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import IMPLEMENTATIONS

import jax_q4k as jq

from .random_weights import random_weights

N, K = 8, 256

rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def experts(count=3):
    """Returns (count, N, K) packed, and the same matrices in a list."""
    each = [random_weights("Q4_K", N, K, seed) for seed in range(count)]
    return jax.tree.map(lambda *planes: jnp.stack(planes), *each), each


@pytest.mark.grid
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_matmul_of_mapped_rows_is_one_call(implementation, axis):
    w, x = random_weights("Q4_K", N, K), normal(2, 3, K)

    def product(x):
        return jq.implementation(implementation)(jq.matmul)(x, w)

    mapped = jax.vmap(product, in_axes=axis, out_axes=0)
    got = mapped(jnp.moveaxis(x, 0, axis))
    np.testing.assert_array_equal(got, product(x))  # both use q8_1 for six rows
    names = [
        equation.primitive.name
        for equation in jax.make_jaxpr(mapped)(jnp.moveaxis(x, 0, axis)).eqns
    ]
    assert names.count("packed_matmul") == 1 and "scan" not in names


def test_matmul_of_mapped_weights():
    stacked, each = experts()
    x = normal(3, 2, K)
    got, shared = (
        jax.vmap(jq.matmul)(x, stacked),
        jax.vmap(jq.matmul, in_axes=(None, 0))(x[0], stacked),
    )
    for i, w in enumerate(each):
        assert nmse(got[i], jq.matmul(x[i], w)) <= 1e-12
        assert nmse(shared[i], jq.matmul(x[0], w)) <= 1e-12


def test_mapped_axes_other_than_the_first():
    stacked, each = experts()
    x, last = normal(2, 3, K), jax.tree.map(lambda plane: jnp.moveaxis(plane, 0, -1), stacked)
    got = jax.vmap(jq.matmul, in_axes=(1, -1))(x, last)
    for i, w in enumerate(each):
        assert nmse(got[i], jq.matmul(x[:, i], w)) <= 1e-12


def test_gradient_of_a_sum_over_mapped_weights():
    stacked, each = experts()
    x = normal(2, K)
    got = jax.grad(
        lambda x: jnp.sum(jnp.sin(jax.vmap(jq.matmul, in_axes=(None, 0))(x, stacked) / K))
    )(x)
    want = jax.grad(lambda x: sum(jnp.sum(jnp.sin(jq.matmul(x, w) / K)) for w in each))(x)
    assert nmse(got, want) <= 1e-11


@pytest.mark.slow("compiles a program for each case")
def test_jacobian_is_the_decoded_weights_and_hessian_follows():
    w, x = random_weights("Q6_K", N, K), normal(K)
    weights = np.asarray(w.dequantize(), np.float64)
    for jacobian in (jax.jacfwd, jax.jacrev):
        assert nmse(jacobian(lambda x: jq.matmul(x, w))(x), weights) <= 1e-12
    hessian = jax.hessian(lambda x: jnp.sum(jq.matmul(x, w, activations="f32") ** 3) / 6)(x)
    assert nmse(hessian, weights.T * (weights @ np.asarray(x, np.float64)) @ weights) <= 1e-11


def test_other_operations():
    stacked, each = experts()
    ids, x = jnp.array([[0, 3], [7, 7], [1, 2]]), normal(3, 2, K)
    np.testing.assert_array_equal(
        jax.vmap(jq.dequantize)(stacked), [jq.dequantize(w) for w in each]
    )
    np.testing.assert_array_equal(
        jax.vmap(jq.embedding)(ids, stacked), list(map(jq.embedding, ids, each))
    )
    shared = jax.vmap(jq.embedding, in_axes=(0, None))(ids, each[0])
    np.testing.assert_array_equal(shared, jq.embedding(ids, each[0]))
    for got, want in zip(jax.vmap(jq.quantize_q8_1)(x), jq.quantize_q8_1(x), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_examples(implementation):
    w, x = random_weights("Q4_K", N, K), jnp.zeros((0, 2, K))
    with jq.implementation(implementation):
        assert jax.vmap(lambda x: jq.matmul(x, w))(x).shape == (0, 2, N)
        assert jax.vmap(lambda x: jq.qkv_matmul(x, [w, w])[1])(x).shape == (0, 2, N)
        assert jax.vmap(lambda x: jq.rms_norm(x, jnp.ones(K), eps=1e-5))(x).shape == (0, 2, K)
        assert jax.vmap(jq.argmax)(x).shape == (0, 2)
