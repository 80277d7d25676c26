import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.format_lists import FEW_ARE_QUICK
from support.implementations import IMPLEMENTATIONS

import jax_q4k as jq
from ptx_kernels import formats

from .random_weights import random_weights


@FEW_ARE_QUICK
@pytest.mark.parametrize("format", formats.names())
def test_rows_of_the_decoded_table(format):
    w = random_weights(format, 10, 256)
    ids = jnp.array([[3, 0], [9, 3]])
    got = jax.jit(jq.embedding)(ids, w)
    assert got.shape == (2, 2, 256) and got.dtype == jnp.float32
    np.testing.assert_array_equal(got, w.dequantize()[ids])


@pytest.mark.slow("compiles a program for each case", quick=["bfloat16-sim"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_rows_of_a_float_table(dtype, implementation):
    table, ids = jax.random.normal(jax.random.key(0), (10, 24), dtype), jnp.array([[1, 7], [9, -1]])
    lookup = jq.implementation(implementation)(jq.embedding)
    got, want = (
        lookup(ids, table, jnp.bfloat16),
        table[ids].astype(jnp.bfloat16).at[1, 1].set(jnp.nan),
    )
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))
    np.testing.assert_array_equal(
        jax.vmap(lookup, in_axes=(0, None))(ids, table), lookup(ids, table)
    )
    shifted = jnp.stack([table, table + 1])
    np.testing.assert_array_equal(jax.vmap(lookup)(ids, shifted), list(map(lookup, ids, shifted)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradient_of_a_float_table(implementation):
    def loss(table):
        rows = jq.implementation(implementation)(jq.embedding)(jnp.array([3, 1, 3]), table)
        return jnp.sum(rows * jnp.arange(1.0, 4)[:, None])

    gradient = jax.jit(jax.grad(loss))(jnp.ones((5, 8)))
    np.testing.assert_array_equal(gradient, np.outer([0, 2, 0, 4, 0], np.ones(8)))


@pytest.mark.parametrize(
    "table", [random_weights("Q4_K", 10, 256), jnp.ones((10, 256))], ids=["packed", "float"]
)
def test_ids_outside_the_vocabulary_give_nan(table):
    for outside in (-1, 10, 2**31 - 1, 2**32 + 3, -(2**32) + 3):  # the last two are 3 in 32 bits
        got = np.asarray(jq.embedding(np.array([outside, 9]), table))
        assert np.isnan(got[0]).all() and np.isfinite(got[1]).all()


def test_unsigned_ids_inside_a_program():
    got = jax.jit(jq.embedding)(
        jnp.array([2**32 - 1, 9], jnp.uint32), random_weights("Q4_K", 10, 256)
    )
    assert np.isnan(got[0]).all() and np.isfinite(got[1]).all()


def test_an_empty_vocabulary_gives_nan():
    assert np.isnan(jq.embedding(jnp.array([0, 1]), jnp.zeros((0, 8)))).all()


def test_no_ids():
    assert jq.embedding(jnp.zeros((2, 0), jnp.int32), random_weights("Q4_K", 10, 256)).shape == (
        2,
        0,
        256,
    )


def test_arguments_that_do_not_fit():
    w = random_weights("Q4_K", 10, 256)
    with pytest.raises(TypeError, match="ids has dtype float32"):
        jq.embedding(jnp.zeros(3), w)
    with pytest.raises(ValueError, match=r"w has shape \(10,\)"):
        jq.embedding(jnp.zeros(3, jnp.int32), jnp.zeros(10))
