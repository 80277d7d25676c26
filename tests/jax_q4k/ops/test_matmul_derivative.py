"""Derivatives of `matmul` in the activations, against decoded weights in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from support.format_lists import FEW_ARE_QUICK, PRODUCTS
from support.helpers import nmse
from support.implementations import IMPLEMENTATIONS

import jax_q4k as jq
from tools import aot

from .random_weights import random_weights

N, K = 24, 256
TOLERANCE = {jnp.float32: 1e-12, jnp.bfloat16: 1e-5, jnp.float16: 1e-6}

rng = np.random.default_rng(0)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def decoded(w):
    return np.asarray(w.dequantize()).astype(np.float64)


def primitives(jaxpr):
    """Yields each equation's primitive and result shapes, including nested jaxprs."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, [v.aval for v in equation.outvars]
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            if hasattr(parameter, "eqns"):
                yield from primitives(parameter)


@FEW_ARE_QUICK
@pytest.mark.grid
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("format", PRODUCTS)
def test_vjp_and_jvp_equal_those_of_the_decoded_weights(format, dtype):
    w = random_weights(format, N, K)
    x, dx, dy = (
        normal(2, 3, K, dtype=dtype),
        normal(2, 3, K, dtype=dtype),
        normal(2, 3, N, dtype=dtype),
    )
    function = functools.partial(jq.matmul, w=w)
    y, pull = jax.vjp(function, x)
    (got,) = pull(dy)
    assert got.dtype == dtype and got.shape == x.shape
    assert nmse(got, np.asarray(dy).astype(np.float64) @ decoded(w)) <= TOLERANCE[dtype]
    value, tangent = jax.jvp(function, (x,), (dx,))
    np.testing.assert_array_equal(value, y)
    assert tangent.dtype == dtype
    assert nmse(tangent, np.asarray(dx).astype(np.float64) @ decoded(w).T) <= TOLERANCE[dtype]
    _, push = jax.linearize(function, x)
    np.testing.assert_array_equal(push(dx), tangent)
    (transpose,) = jax.linear_transpose(function, x)(dy)
    np.testing.assert_array_equal(transpose, got)


@FEW_ARE_QUICK
@pytest.mark.grid
@pytest.mark.parametrize("rows", [2, 9])  # with a kernel for int8 activations, and decoded
@pytest.mark.parametrize("format", PRODUCTS)
def test_simulated_kernels_give_the_same_derivative(format, rows):
    w = random_weights(format, N, K)
    x, dy = normal(rows, K), normal(rows, N)
    got, want = (
        jax.jit(
            lambda x, w, dy, name=name: jax.vjp(
                lambda x: jq.implementation(name)(jq.matmul)(x, w), x
            )[1](dy)
        )(x, w, dy)
        for name in ("sim", "xla")
    )
    assert nmse(got[0], want[0]) <= 1e-12


@pytest.mark.parametrize("rows", [2, 9])
def test_simulated_kernels_keep_the_activations_dtype(rows):
    w, x, dy = (
        random_weights("Q4_K", N, K),
        normal(rows, K, dtype=jnp.bfloat16),
        normal(rows, N, dtype=jnp.bfloat16),
    )
    y, pull = jax.vjp(lambda x: jq.implementation("sim")(jq.matmul)(x, w), x)
    (got,) = pull(dy)
    assert y.dtype == got.dtype == jnp.bfloat16
    assert nmse(got, np.asarray(dy).astype(np.float64) @ decoded(w)) <= TOLERANCE[jnp.bfloat16]


@FEW_ARE_QUICK
@pytest.mark.grid
@pytest.mark.parametrize("format", PRODUCTS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rounding_of_the_activations_is_passed_straight_through(format, implementation):
    w = random_weights(format, N, K)
    x, dx, dy = normal(2, K), normal(2, K), normal(2, N)
    with jq.implementation(implementation, activations="q8_1"):
        rounded, tangent = jax.jvp(lambda x: jq.matmul(x, w), (x,), (dx,))
        (transpose,) = jax.linear_transpose(lambda x: jq.matmul(x, w), x)(dy)
    # the value uses int8 activations
    assert nmse(rounded, jq.matmul(x, w, activations="f32")) >= 1e-6
    assert nmse(tangent, np.asarray(dx).astype(np.float64) @ decoded(w).T) <= 1e-12
    assert nmse(transpose, np.asarray(dy).astype(np.float64) @ decoded(w)) <= 1e-12


@pytest.mark.slow("compiles second derivatives")
def test_finite_differences_to_the_second_order():
    w = random_weights("Q4_K", 8, K)
    exact = functools.partial(jq.matmul, w=w, activations="f32")
    check_grads(
        lambda x: jnp.sin(exact(x) / 64), (normal(2, K),), order=2, eps=1e-2, atol=2e-3, rtol=2e-3
    )


@pytest.mark.slow("compiles a program for each case", quick=["reverse"])
@pytest.mark.parametrize("outer", ["forward", "reverse"])
def test_derivative_of_the_derivative(outer):
    """Hessian times v is (y * (v W^T)) W, for f(x) = sum(y^3) / 6, y = x W^T."""
    w = random_weights("Q6_K", N, K)
    x, v = normal(3, K), normal(3, K)
    gradient = jax.grad(lambda x: jnp.sum(jq.matmul(x, w, activations="f32") ** 3) / 6)
    if outer == "forward":
        _, got = jax.jvp(gradient, (x,), (v,))
    else:
        got = jax.grad(lambda x: jnp.vdot(gradient(x), v))(x)
    x64, v64 = np.asarray(x, np.float64), np.asarray(v, np.float64)
    assert nmse(got, ((x64 @ decoded(w).T) * (v64 @ decoded(w).T)) @ decoded(w)) <= 1e-11


@pytest.mark.slow("compiles derivatives of a loop", quick=["recomputed"])
@pytest.mark.parametrize("wrap", [lambda layer: layer, jax.checkpoint], ids=["kept", "recomputed"])
def test_gradient_through_a_scan_over_stacked_layers(wrap):
    layers = [random_weights("Q4_K", K, K, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *planes: jnp.stack(planes), *layers)
    x = normal(2, K)

    @jax.jit
    def packed(x, stacked):
        layer = wrap(lambda x, w: (jnp.tanh(jq.matmul(x, w, activations="f32") / K), None))
        return jnp.sum(jax.lax.scan(layer, x, stacked)[0] ** 2)

    def unrolled(x):
        for w in layers:
            x = jnp.tanh(jnp.dot(x, w.dequantize().T, precision="highest") / K)
        return jnp.sum(x**2)

    assert nmse(jax.grad(packed)(x, stacked), jax.grad(unrolled)(x)) <= 1e-10
    v = normal(2, K)
    (got,) = jax.jvp(lambda x: jax.grad(packed)(x, stacked), (x,), (v,))[1:]
    assert nmse(got, jax.jvp(jax.grad(unrolled), (x,), (v,))[1]) <= 1e-10


def test_float_weights_have_gradients_too():
    x, w, dy = normal(3, 40), normal(8, 40), normal(3, 8)
    dx, dw = jax.vjp(jq.matmul, x, w)[1](dy)
    assert nmse(dx, np.asarray(dy, np.float64) @ np.asarray(w, np.float64)) <= 1e-12
    assert nmse(dw, np.asarray(dy, np.float64).T @ np.asarray(x, np.float64)) <= 1e-12


def test_a_product_that_the_loss_does_not_use():
    w, x = random_weights("Q4_K", N, K), normal(2, K)

    @jax.jit
    def pair(x):
        return jq.matmul(x, w), 2 * x

    np.testing.assert_array_equal(jax.grad(lambda x: jnp.vdot(pair(x)[1], x))(x), 4 * x)


def test_no_rows():
    w = random_weights("Q4_K", N, K)
    assert jax.grad(lambda x: jnp.sum(jq.matmul(x, w)))(jnp.zeros((0, K))).shape == (0, K)


def test_packed_weights_are_constants():
    w, x = random_weights("Q4_K", N, K), normal(2, K)

    def loss(arguments):
        return jnp.sum(jq.matmul(arguments["x"], arguments["w"]) ** 2)

    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs.*uint8"):
        jax.grad(loss)({"x": x, "w": w})
    gradient = jax.grad(loss, allow_int=True)({"x": x, "w": w})
    assert nmse(gradient["x"], jax.grad(lambda x: loss({"x": x, "w": w}))(x)) <= 1e-12
    assert isinstance(gradient["w"], jq.QuantizedArray)
    assert [(p.dtype, p.shape) for p in gradient["w"].planes] == [
        (jax.dtypes.float0, p.shape) for p in w.planes
    ]


def test_cotangent_of_another_shape_or_dtype():
    w, x = random_weights("Q4_K", N, K), normal(2, K)
    _, pull = jax.vjp(lambda x: jq.matmul(x, w), x)
    with pytest.raises(ValueError, match=r"float32\[2,25\], but expected float32\[2,24\]"):
        pull(jnp.zeros((2, N + 1)))
    with pytest.raises(ValueError, match=r"bfloat16\[2,24\], but expected float32\[2,24\]"):
        pull(jnp.zeros((2, N), jnp.bfloat16))


def test_no_decoded_weights_lie_in_the_program():
    """Neither the product alone nor the residuals of the backward pass contain decoded weights."""
    w, x = random_weights("Q4_K", N, K), normal(2, K)

    def loss(x, w):
        return jnp.sum(jax.nn.silu(jq.matmul(x, w)))

    def matrices(function):
        found = list(primitives(jax.make_jaxpr(function)(x, w).jaxpr))
        large = [
            a
            for _, avals in found
            for a in avals
            if a.size >= N * K and jnp.issubdtype(a.dtype, jnp.floating)
        ]
        return [name for name, _ in found].count("packed_matmul"), large

    assert matrices(loss) == (1, [])
    assert matrices(jax.grad(loss)) == (2, [])
    residuals = jax.tree.leaves(jax.vjp(lambda x: loss(x, w), x)[1])
    assert {str(leaf.dtype) for leaf in residuals if leaf.size >= N * K // 2} <= {"uint8"}


def test_embedding_and_dequantize_within_a_gradient():
    w, head = random_weights("Q4_K", N, K), random_weights("Q6_K", N, K, 1)
    ids, scale = jnp.array([[0, 7], [23, 7]]), normal(K)

    def loss(scale, embedding, project):
        return jnp.sum(jnp.sin(project(embedding(ids) * scale) / K))

    got = jax.grad(loss)(
        scale, lambda ids: jq.embedding(ids, w), lambda x: x @ jq.dequantize(head).T
    )
    want = jax.grad(loss)(scale, lambda ids: w.dequantize()[ids], lambda x: x @ head.dequantize().T)
    assert nmse(got, want) <= 1e-11


@pytest.mark.slow("compiles a program for each case", quick=["Q4_K"])
@pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))
@pytest.mark.parametrize("format", ["Q4_K", "Q5_0"])
def test_lowered_for_cuda_the_backward_pass_decodes_by_our_kernel(format):
    w, x, dy = random_weights(format, N, K), normal(2, K), normal(2, N)
    program = aot.compile_program(
        jax.jit(lambda x, w, dy: jax.vjp(lambda x: jq.matmul(x, w), x)[1](dy)), x, w, dy
    )
    assert [launch.name.split("_")[0] for launch in program.ptx_launches] == ["decode"]
    value_and_grad = jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(jq.matmul(x, w) ** 2)))
    both = aot.compile_program(value_and_grad, x, w)
    families = {launch.name.split("_")[0] for launch in both.ptx_launches}
    assert families == {"matvec", "decode"}  # its prologue quantizes


@pytest.mark.slow("compiles for a GPU")
@pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))
def test_lowered_for_cuda_decoded_weights_do_not_outlive_their_product(record_property):
    """Both passes multiply decoded weights, with `f32` activations.

    XLA must not keep the decoded weights of all layers.
    """
    size, layers = 512, [random_weights("Q4_K", 512, 512, seed) for seed in range(4)]

    def loss(x, layers):
        for w in layers:
            x = jnp.tanh(jq.matmul(x, w, activations="f32") / size)
        return jnp.sum(x)

    program = aot.compile_program(jax.jit(jax.grad(loss)), normal(16, size), layers)
    assert [launch.name.split("_")[0] for launch in program.ptx_launches] == ["decode"] * 2 * len(
        layers
    )
    matrices = program.temp_bytes / (size * size * 4)
    record_property(
        "figure",
        f"gradient through {len(layers)} layers, for an H200: {matrices:.2f} decoded at once",
    )
    assert matrices <= 2.5
