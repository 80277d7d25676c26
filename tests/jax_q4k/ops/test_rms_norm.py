import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import IMPLEMENTATIONS

import jax_q4k as jq
from ptx_kernels.kernels.rms_norm import MAX_COLUMNS

rng = np.random.default_rng(0)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def exact(x, weight, eps):
    x, weight = (np.asarray(a).astype(np.float64) for a in (x, weight))
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * weight


@pytest.mark.grid
# 30 columns use XLA with every implementation
@pytest.mark.parametrize("shape", [(96,), (2, 3, 1056), (2, 30)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_the_definition(implementation, shape):
    x, weight = normal(*shape), normal(shape[-1])
    y = jq.implementation(implementation)(jq.rms_norm)(x, weight, eps=0.25)
    assert y.shape == shape and y.dtype == jnp.float32
    assert nmse(y, exact(x, weight, 0.25)) <= 1e-12


@pytest.mark.grid
@pytest.mark.parametrize("shape", [(96,), (2, 3, 1056), (2, 30)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_residual_is_added(implementation, shape):
    x, weight, residual = normal(*shape), normal(shape[-1]), normal(*shape)
    with jq.implementation(implementation):
        y = jq.rms_norm(x, weight, eps=0.25, residual=residual)
        half = jq.rms_norm(x.astype(jnp.bfloat16), weight, eps=0.25, residual=residual)
        mapped = jax.vmap(lambda x, r: jq.rms_norm(x, weight, eps=0.25, residual=r))
        both = mapped(jnp.stack([x, residual]), jnp.stack([residual, x]))
    want = np.asarray(residual, np.float64) + exact(x, weight, 0.25)
    assert nmse(y, want) <= 1e-12
    assert half.dtype == jnp.bfloat16 and nmse(half, want) <= 1e-4
    other = np.asarray(x, np.float64) + exact(residual, weight, 0.25)
    assert nmse(both, [want, other]) <= 1e-12


def test_a_residual_that_does_not_fit():
    x, weight = normal(2, 64), normal(64)
    with pytest.raises(ValueError, match=r"residual has shape \(64,\)"):
        jq.rms_norm(x, weight, eps=1e-6, residual=weight)
    with pytest.raises(TypeError, match="residual has dtype int"):
        jq.rms_norm(x, weight, eps=1e-6, residual=jnp.zeros((2, 64), int))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_result_has_the_dtype_of_x(dtype):
    x, weight = normal(4, 64, dtype=dtype), normal(64, dtype=dtype)
    y = jq.rms_norm(x, weight, eps=1e-6)
    assert y.dtype == dtype
    assert nmse(y, exact(x, weight, 1e-6)) <= 1e-5


def test_rows_longer_than_the_kernel_takes():
    x, weight = normal(1, MAX_COLUMNS + 4), normal(MAX_COLUMNS + 4)
    assert (
        nmse(jq.implementation("sim")(jq.rms_norm)(x, weight, eps=1e-6), exact(x, weight, 1e-6))
        <= 1e-12
    )


def test_zeros_and_poison_stay_in_their_rows():
    x = jnp.zeros((3, 64)).at[1, 5].set(jnp.nan).at[2].set(1.0)
    for implementation in ("xla", "sim"):
        y = jq.implementation(implementation)(jq.rms_norm)(x, jnp.ones(64), eps=1e-6)
        assert not y[0].any() and jnp.isnan(y[1]).any() and jnp.isfinite(y[2]).all()


@pytest.mark.slow("compiles a program for each case", quick=["sim"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_derivatives_in_both_operands(implementation):
    x, weight, dx, dweight, dy = normal(2, 64), normal(64), normal(2, 64), normal(64), normal(2, 64)
    eps = 0.25

    def plain(x, weight):
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + eps) * weight

    def ours(x, weight):
        return jq.implementation(implementation)(jq.rms_norm)(x, weight, eps=eps)

    (_, got), (_, want) = (jax.jvp(f, (x, weight), (dx, dweight)) for f in (ours, plain))
    assert nmse(got, want) <= 1e-11
    for got, want in zip(*(jax.vjp(f, x, weight)[1](dy) for f in (ours, plain)), strict=True):
        assert nmse(got, want) <= 1e-11
    got, want = (
        jax.grad(lambda x, f=f: jnp.vdot(jax.grad(lambda x: jnp.sum(f(x, weight) ** 3))(x), dx))(x)
        for f in (ours, plain)
    )
    assert nmse(got, want) <= 1e-10


def test_vmap_of_rows_is_one_call_and_of_weights_one_each():
    x, weights = normal(3, 2, 64), normal(3, 64)
    one = jax.vmap(lambda x: jq.rms_norm(x, weights[0], eps=1e-6))
    np.testing.assert_array_equal(one(x), jq.rms_norm(x, weights[0], eps=1e-6))
    assert "scan" not in str(jax.make_jaxpr(one)(x))
    got = jax.vmap(lambda x, w: jq.rms_norm(x, w, eps=1e-6))(x, weights)
    for i in range(3):
        assert nmse(got[i], exact(x[i], weights[i], 1e-6)) <= 1e-12


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x: jq.rms_norm(x, jnp.ones(65), eps=1e-6),
            ValueError,
            r"weight has shape \(65,\).*\(64,\)",
        ),
        (lambda x: jq.rms_norm(x[0, 0], x[0], eps=1e-6), ValueError, r"x has shape \(\)"),
        (
            lambda x: jq.rms_norm(x, x[0], eps=-1),
            ValueError,
            "eps=-1.0 must be finite in float32 and at least 0",
        ),
        (lambda x: jq.rms_norm(x, x[0], eps=None), ValueError, "eps=None"),
        (lambda x: jq.rms_norm(x.astype(int), x[0], eps=1e-6), TypeError, "x has dtype int"),
    ],
)
def test_arguments_that_do_not_fit(call, error, message):
    with pytest.raises(error, match=message):
        call(jnp.ones((2, 64)))


def test_no_rows():
    assert jq.rms_norm(jnp.zeros((0, 64)), jnp.ones(64), eps=1e-6).shape == (0, 64)
