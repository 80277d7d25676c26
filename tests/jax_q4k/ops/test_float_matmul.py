"""Products with float weights, which keep their dtype, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import NATIVE, needs_native

import jax_q4k as jq
from jax_q4k.ops.float_matmul import MAX_F32_ROWS

CPU = ["xla", NATIVE]  # `sim` has no kernels of its own for floats
DTYPES = [jnp.float32, jnp.float16, jnp.bfloat16]


def normal(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def exact(x, w):
    return np.asarray(x).astype(np.float64) @ np.asarray(w).astype(np.float64).T


@pytest.mark.grid
@pytest.mark.parametrize("implementation", CPU)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 37, 40), (5, 4, 513), (MAX_F32_ROWS + 1, 17, 96), (70, 130, 31)]
)
def test_equals_the_product(m, n, k, dtype, implementation):
    x, w = normal(m, k), normal(n, k, dtype=dtype, seed=1)
    y = jq.implementation(implementation)(jq.matmul)(x, w)
    assert y.dtype == jnp.float32 and nmse(y, exact(x, w)) <= 1e-12
    narrow = jq.implementation(implementation)(jq.matmul)(x.astype(jnp.bfloat16), w)
    assert narrow.dtype == jnp.bfloat16
    assert nmse(narrow, exact(x.astype(jnp.bfloat16), w)) <= 1e-5  # rounding of the result


@pytest.mark.grid
@pytest.mark.parametrize("implementation", CPU)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_subnormal_and_largest_weights(dtype, implementation):
    info = jnp.finfo(dtype)
    values = [info.max, -info.max, info.smallest_normal, 1.0] + (
        [info.smallest_subnormal] if dtype == jnp.float16 else []
    )
    w, x = jnp.asarray(np.diag(values), dtype), np.ones((2, len(values)), np.float32)  # fmt: skip
    got = jq.implementation(implementation)(jq.matmul)(x, w)
    np.testing.assert_array_equal(
        got, np.broadcast_to(np.asarray(values, dtype).astype(np.float32), got.shape)
    )


@pytest.mark.parametrize("implementation", CPU)
def test_a_non_finite_value_spoils_only_its_row(implementation):
    x = normal(6, 40).at[1, 7].set(jnp.nan).at[4, 39].set(jnp.inf)
    y = np.isfinite(
        jq.implementation(implementation)(jq.matmul)(x, normal(9, 40, dtype=jnp.float16))
    )
    assert y[[0, 2, 3, 5]].all() and not y[[1, 4]].any()


@pytest.mark.grid
@pytest.mark.parametrize("implementation", CPU)
@pytest.mark.parametrize("dtype", DTYPES)
def test_derivatives_in_both_operands(dtype, implementation):
    x, w, dx, dw = (
        normal(3, 40),
        normal(8, 40, dtype=dtype),
        normal(3, 40, seed=1),
        normal(8, 40, dtype=dtype, seed=1),
    )
    product = jq.implementation(implementation)(jq.matmul)
    value, tangent = jax.jvp(product, (x, w), (dx, dw))
    np.testing.assert_array_equal(value, product(x, w))
    assert nmse(tangent, exact(dx, w) + exact(x, dw)) <= 1e-11
    dy = normal(3, 8)
    got_x, got_w = jax.jit(lambda x, w: jax.vjp(product, x, w)[1](dy))(x, w)
    assert nmse(got_x, exact(dy, w.T)) <= 1e-11 and got_w.dtype == dtype
    assert nmse(got_w, exact(dy.T, x.T)) <= (1e-11 if dtype == jnp.float32 else 1e-5)
    only_x = jax.grad(lambda x: jnp.vdot(product(x, w), dy))(x)
    assert nmse(only_x, exact(dy, w.T)) <= 1e-11
    # d^2 sum(y^2) / 2 in x: dx W^T W
    _, second = jax.jvp(jax.grad(lambda x: jnp.sum(product(x, w) ** 2) / 2), (x,), (dx,))
    assert nmse(second, exact(exact(dx, w), np.asarray(w).astype(np.float64).T)) <= 1e-11


@pytest.mark.parametrize("implementation", CPU)
def test_vmap(implementation):
    product = jq.implementation(implementation)(jq.matmul)
    x, w = normal(3, 2, 40), normal(3, 8, 40, dtype=jnp.bfloat16)
    rows = jax.vmap(product, in_axes=(1, None))
    names = [equation.primitive.name for equation in jax.make_jaxpr(rows)(x, w[0]).eqns]
    assert names.count("float_matmul") == 1 and "scan" not in names
    assert nmse(rows(x, w[0]), np.swapaxes(exact(x, w[0]), 0, 1)) <= 1e-12
    stacked, shared = jax.vmap(product), jax.vmap(product, in_axes=(None, 0))
    assert "scan" not in str(jax.make_jaxpr(stacked)(x, w))
    for i in range(3):
        assert nmse(stacked(x, w)[i], exact(x[i], w[i])) <= 1e-12
        assert nmse(shared(x[0], w)[i], exact(x[0], w[i])) <= 1e-12
    gradient = jax.grad(lambda w: jnp.sum(jax.vmap(product)(x, w)))(w.astype(jnp.float32))
    assert (
        nmse(gradient, np.broadcast_to(np.asarray(x, np.float64).sum(1)[:, None], w.shape)) <= 1e-11
    )


def temp_bytes(implementation, w, call):
    """Temporary memory of a loop that passes activations through `call`."""

    def loop(x, w):
        return jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(call(x, w)), x)

    with jq.implementation(implementation):
        return (
            jax.jit(loop)
            .lower(jnp.ones((1, w.shape[1])), w)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )


@pytest.mark.slow("compiles a program for each case", quick=["bfloat16"])
@needs_native
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_loop_makes_no_float32_copy_of_the_weights(dtype):
    w = normal(256, 256, dtype=dtype)
    calls = {
        "matmul": jq.matmul,
        "rms_norm_matmul": lambda x, w: jq.rms_norm_matmul(
            x, jnp.ones(256), w, eps=1e-5, residual=x
        ),
        "qkv_matmul": lambda x, w: sum(
            jq.qkv_matmul(x, (w, w, w), norm_weight=jnp.ones(256), eps=1e-5)
        ),
        "mlp": lambda x, w: jq.mlp(x, w, w, w, norm_weight=jnp.ones(256), eps=1e-5, residual=x),
        "embedding": lambda x, w: jq.embedding(jnp.argmax(x, axis=-1), w),
    }
    for name, call in calls.items():
        assert temp_bytes("native", w, call) < w.size, name
    assert temp_bytes("xla", w, jq.matmul) >= 4 * w.size  # the kernels save this
