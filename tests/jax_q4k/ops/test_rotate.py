import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import IMPLEMENTATIONS, needs_native
from support.oracles import rotated

import jax_q4k as jq
from jax_q4k import native, rotate

rng = np.random.default_rng(0)


def operands(tokens, heads, head_dim, rope_dim):
    angles = rng.uniform(-4, 4, (tokens, rope_dim // 2)).astype(np.float32)
    return (
        rng.standard_normal((tokens, heads, head_dim)).astype(np.float32),
        np.cos(angles),
        np.sin(angles),
    )


@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("interleaved", [True, False])
# less than a vector, a vector and more, the full head
@pytest.mark.parametrize("rope_dim", [2, 22, 48])
@pytest.mark.parametrize("tokens", [1, 19])
def test_equals_the_definition(implementation, interleaved, rope_dim, tokens):
    x, cos, sin = operands(tokens, 3, 48, rope_dim)
    got = jq.implementation(implementation)(rotate)(x, cos, sin, interleaved=interleaved)
    assert nmse(got, rotated(x, cos, sin, interleaved)) <= 1e-13
    np.testing.assert_array_equal(got[..., rope_dim:], x[..., rope_dim:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_leading_axes_and_vmap(implementation):
    x, cos, sin = (a.reshape(2, 5, *a.shape[1:]) for a in operands(10, 2, 32, 16))
    together = jq.implementation(implementation)(rotate)(x, cos, sin, interleaved=True)
    mapped = jax.vmap(
        lambda *row: jq.implementation(implementation)(rotate)(*row, interleaved=True)
    )(x, cos, sin)
    np.testing.assert_array_equal(together, mapped)
    assert rotate(x[:0], cos[:0], sin[:0], interleaved=True).shape == (0, 5, 2, 32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_gradient_turns_back(implementation):
    x, cos, sin = operands(4, 2, 32, 16)
    dy = rng.standard_normal(x.shape).astype(np.float32)
    (dx,) = jax.vjp(
        lambda x: jq.implementation(implementation)(rotate)(x, cos, sin, interleaved=False), x
    )[1](dy)
    assert nmse(dx, rotated(dy, cos, -sin, False)) <= 1e-13


def test_operands_that_do_not_fit():
    x, cos, sin = map(jnp.asarray, operands(4, 2, 32, 16))
    for error, message, change in (
        (
            ValueError,
            r"x has shape \(32,\); it must be \(\.\.\., heads, head_dim\)",
            dict(x=x[0, 0]),
        ),
        (
            ValueError,
            r"cos has shape \(3, 8\); it must be \(4, rope_dim / 2 <= 16\)",
            dict(cos=cos[:3]),
        ),
        (ValueError, r"cos has shape \(4, 17\); it must be", dict(cos=jnp.zeros((4, 17)))),
        (ValueError, r"cos has shape \(4, 0\); it must be", dict(cos=jnp.zeros((4, 0)))),
        (ValueError, r"sin has shape \(4, 7\)", dict(sin=sin[:, :7])),
        (TypeError, "x has dtype int32", dict(x=x.astype(jnp.int32))),
        (TypeError, "interleaved=1 must be True or False", dict(interleaved=1)),
    ):
        given = dict(x=x, cos=cos, sin=sin, interleaved=True) | change
        with pytest.raises(error, match=message):
            rotate(given.pop("x"), given.pop("cos"), given.pop("sin"), **given)


@needs_native
def test_the_handler_checks_its_operands():
    x, cos, sin = operands(4, 2, 32, 16)
    struct = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    for given, message in (
        ((x, cos[:3], sin), r"cos has shape \(3, 8\)"),
        ((x, cos, sin[:, :7]), r"sin has shape \(4, 7\)"),
        (
            (x, np.zeros((4, 17), np.float32), np.zeros((4, 17), np.float32)),
            "more angles than half of head_dim",
        ),
        ((x, cos), "sin is missing"),
        ((x, cos, sin, sin), "too many operands"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            native.call("rotate", [struct], *given, interleaved=True)
