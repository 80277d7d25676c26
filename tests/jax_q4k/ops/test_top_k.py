import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.implementations import IMPLEMENTATIONS, needs_native

import jax_q4k as jq
from ptx_kernels.kernels.argmax import argmax_splits_rule
from ptx_kernels.kernels.top_k import MAX_PART, top_k_splits_rule
from ptx_kernels.tuning import choose


def values(*shape, distinct=50, dtype=jnp.float32):
    """Few distinct values, so that there are ties."""
    return (
        jnp.asarray(np.random.default_rng(sum(shape)).integers(-distinct, distinct, shape), dtype)
        / 4
    )


@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(1,), (33,), (2, 3, 700), (2, 1536), (2, 3000)])
def test_argmax_is_the_first_of_the_largest(shape, implementation):
    x = values(*shape)
    best = jq.implementation(implementation)(jq.argmax)(x)
    assert best.dtype == jnp.int32 and best.shape == shape[:-1]
    np.testing.assert_array_equal(best, np.argmax(x, axis=-1))


@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "shape, k", [((1,), 1), ((33,), 33), ((2, 3, 700), 5), ((2, MAX_PART + 905), 40)]
)
def test_top_k_is_a_stable_sort(shape, k, implementation):
    x = values(*shape)
    found, indices = jq.implementation(implementation)(jq.top_k)(x, k)
    order = np.argsort(-np.asarray(x), axis=-1, kind="stable")[..., :k]
    assert indices.dtype == jnp.int32 and found.shape == indices.shape == (*shape[:-1], k)
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(found, np.take_along_axis(np.asarray(x), order, -1))


def test_rows_of_both_lengths_are_searched_by_one_and_two_launches():
    assert choose(argmax_splits_rule, 700) == choose(top_k_splits_rule, 700, 5) == 1
    assert (
        choose(argmax_splits_rule, 3000) > 1 and choose(top_k_splits_rule, MAX_PART + 905, 40) > 1
    )


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("columns", [64, 1500, 5000])
def test_the_first_nan_of_a_long_row_is_the_largest(columns, implementation):
    x = np.random.default_rng(0).standard_normal((50, columns)).astype(np.float32)
    at = np.arange(50) * (columns - 1) // 49
    x[np.arange(50), at], x[:, -1] = np.nan, np.nan
    x[2::2, 0] = np.inf
    with jq.implementation(implementation):
        assert jax.jit(jq.argmax)(x).tolist() == at.tolist()


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_the_largest_of_negative_values_is_the_nearest_to_zero(implementation):
    x = -1 - np.abs(np.random.default_rng(1).standard_normal((9, 1500))).astype(np.float32)
    with jq.implementation(implementation):
        assert jax.jit(jq.argmax)(x).tolist() == x.argmax(axis=1).tolist()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_infinities_and_zeros(implementation):
    x = jnp.array([1.0, jnp.nan, 3.0, -0.0, 0.0, 3.0, jnp.inf, -jnp.nan, -jnp.inf])
    assert jq.implementation(implementation)(jq.argmax)(x) == 1
    assert jq.implementation(implementation)(jq.argmax)(x[2:6]) == 0
    assert jq.implementation(implementation)(jq.argmax)(jnp.full(5, -jnp.inf)) == 0
    parts = jnp.zeros(2048).at[1700].set(jnp.nan).at[3].set(jnp.inf)
    assert jq.implementation(implementation)(jq.argmax)(parts) == 1700
    assert jq.implementation(implementation)(jq.argmax)(-parts[:1500]) == 0
    _, indices = jq.implementation(implementation)(jq.top_k)(x, 9)
    assert indices.tolist() == [1, 7, 6, 2, 5, 0, 3, 4, 8]


#: Number of values -> what top-k orders; n = 2 groups of the CPU's kernel and more, or fewer.
ORDERS = {
    "few values": lambda rng, n: rng.integers(0, 9, n),
    "ascending": lambda rng, n: np.arange(n),
    "descending": lambda rng, n: -np.arange(n),
    "equal": lambda rng, n: np.zeros(n),
    "nearly all excluded": lambda rng, n: np.where(rng.random(n) < 0.01, rng.random(n), -np.inf),
    "many NaN": lambda rng, n: np.where(rng.random(n) < 0.5, np.nan, rng.random(n)),
    "infinite": lambda rng, n: np.where(rng.random(n) < 0.5, np.inf, -np.inf),
    "any": lambda rng, n: rng.standard_normal(n),
    "both zeros, and subnormals": lambda rng, n: rng.choice([0.0, -0.0, 1e-40, -1e-40, 1.0], n),
}


@needs_native
@pytest.mark.cpu_kernels
@pytest.mark.parametrize("order", ORDERS)
def test_long_rows_on_a_cpu(order):
    rng = np.random.default_rng(0)
    for n, k in ((5000, 5000), (8191, 2000), (6000, 1000), (6007, 1), (700, 100)):
        x = np.stack([ORDERS[order](rng, n) for _ in range(3)]).astype(np.float32)
        found, indices = jq.implementation("native")(jq.top_k)(x, k)
        x = np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)
        keys = np.where(np.isnan(x), -np.inf, -x), ~np.isnan(x)  # NaN before infinities
        want = np.lexsort(keys, axis=-1)[:, :k]
        np.testing.assert_array_equal(indices, want)
        np.testing.assert_array_equal(found, np.take_along_axis(x, want, -1))


def test_a_slice_of_the_results_is_not_cut_from_a_sort():
    """XLA's top-k takes a tenth of the time of a sort."""
    with jq.implementation("xla"):
        lowered = jax.jit(lambda x: jq.top_k(x, 40)[0][:, -1]).lower(jnp.zeros((2, 3000)))
    assert " sort(" not in lowered.compile().as_text()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_result_has_the_dtype_of_x(dtype):
    found, _ = jq.top_k(values(4, 64, dtype=dtype), 3)
    assert found.dtype == dtype


def test_many_candidates_take_several_launches():
    x = jnp.round(jax.random.normal(jax.random.key(1), (2, 3 * MAX_PART + 5)), 1)  # many ties
    x = jnp.where(x == 0, 0.0, x).at[0, 7].set(jnp.nan).at[1, : 2 * MAX_PART].set(-jnp.inf)
    found, indices = jq.implementation("sim")(jq.top_k)(x, 2048)
    want, where = jax.lax.top_k(x, 2048)
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(indices, where)


def test_more_than_the_kernels_take_is_left_to_xla():
    x = jax.random.normal(jax.random.key(0), (1, MAX_PART + 8))
    found, indices = jq.implementation("sim")(jq.top_k)(x, MAX_PART + 1)
    want, where = jax.lax.top_k(x, MAX_PART + 1)
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(indices, where)


@pytest.mark.slow("compiles a program for each case", quick=["native", "sim"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_jit_vmap_and_no_rows(implementation):
    x = values(3, 4, 70)

    @jax.jit
    def both(x):
        return jq.implementation(implementation)(jq.argmax)(x), *jq.implementation(implementation)(
            jq.top_k
        )(x, 2)

    for mapped, whole in zip(jax.vmap(both, in_axes=1, out_axes=1)(x), both(x), strict=True):
        np.testing.assert_array_equal(mapped, whole)
    none = both(x[:0])
    assert [y.shape for y in none] == [(0, 4), (0, 4, 2), (0, 4, 2)]


def test_bad_arguments_are_refused():
    with pytest.raises(
        ValueError, match=r"x has shape \(3, 0\); its last axis must hold at least one value"
    ):
        jq.argmax(jnp.zeros((3, 0)))
    with pytest.raises(ValueError, match=r"k=0 must be 1 to 5"):
        jq.top_k(jnp.zeros(5), 0)
    with pytest.raises(ValueError, match=r"k=6 must be 1 to 5"):
        jq.top_k(jnp.zeros(5), 6)
    with pytest.raises(TypeError, match="k is of type float; it must be a static integer"):
        jq.top_k(jnp.zeros(5), 2.0)
    with pytest.raises(TypeError, match="int32"):
        jq.argmax(jnp.zeros(5, jnp.int32))


def test_top_k_of_a_list():
    values, indices = jq.top_k([1.0, 3.0, 2.0], 2)
    assert (values.dtype, values.tolist(), indices.tolist()) == (jnp.float32, [3.0, 2.0], [1, 2])


@pytest.mark.slow("compiles a program for each case", quick=["native"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_derivatives_look_the_values_up(implementation):
    x = jnp.asarray(np.random.default_rng(3).standard_normal((3, 40)), jnp.float32)

    def loss(top_k, argmax):
        def of(x):
            values, indices = top_k(x, 5)
            return jnp.sum(values**2) + jnp.sum(indices) + jnp.sum(argmax(x))

        return of

    with jq.implementation(implementation):
        got = jax.grad(loss(jq.top_k, jq.argmax))(x)
    want = jax.grad(loss(jax.lax.top_k, lambda x: jnp.argmax(x, axis=-1)))(x)
    np.testing.assert_array_equal(got, want)
