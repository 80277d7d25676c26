"""Fused products against float64 and the unfused chains.

Their kernels run in the simulator.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import IMPLEMENTATIONS

import jax_q4k as jq

from .random_weights import random_weights

K, EPS = 256, 1e-5
rng = np.random.default_rng(0)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def weights(*formats, n=(32, 8, 11), k=K):
    """Packed matrices (n_i, k), scaled so that products with normal activations are about 1."""
    return tuple(
        random_weights(f, size, k, i) for i, (f, size) in enumerate(zip(formats, n, strict=False))
    )


GATE, UP, DOWN = (
    random_weights("Q4_K", K, K, 1),
    random_weights("Q4_K", K, K, 2),
    random_weights("Q6_K", 24, K, 3),
)
# keeps the gate from saturating
NORM = jnp.asarray(np.random.default_rng(9).uniform(0.5, 2, K), jnp.float32) / 64

#: Name -> f(x, residual, norm_weight, **options), a tuple of results; `residual` is (rows, 24).
CALLS = {
    "matmul": lambda x, r, g, **o: (jq.matmul(x, DOWN, bias=jnp.arange(24.0), residual=r, **o),),
    "rms_norm_matmul": lambda x, r, g, **o: (
        jq.rms_norm_matmul(x, g, DOWN, eps=EPS, residual=r, **o),
    ),
    "qkv_matmul": lambda x, r, g, **o: jq.qkv_matmul(
        x, QKV, norm_weight=g, eps=EPS, biases=(jnp.arange(32.0), None, jnp.ones(11)), **o
    ),
    "gated_matmul": lambda x, r, g, **o: (
        jq.gated_matmul(x, GATE, UP, norm_weight=g, eps=EPS, activation="gelu", **o),
    ),
    "mlp": lambda x, r, g, **o: (
        jq.mlp(x, GATE, UP, DOWN, norm_weight=g, eps=EPS, residual=r, **o),
    ),
}
QKV = weights("Q4_K", "Q4_K", "Q6_K")
NAMES = ("packed_matmul", "linear", "mlp", "rms_norm")  # primitives


def exact(name, x, residual, norm_weight):
    """Computes the call in float64."""
    x, residual, norm_weight = (np.asarray(a, np.float64) for a in (x, residual, norm_weight))
    h = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPS) * norm_weight

    def product(a, w):
        return a @ np.asarray(w.dequantize(), np.float64).T

    if name == "matmul":
        return (residual + product(x, DOWN) + np.arange(24),)
    if name == "rms_norm_matmul":
        return (residual + product(h, DOWN),)
    if name == "qkv_matmul":
        return tuple(product(h, w) + b for w, b in zip(QKV, (np.arange(32), 0, 1), strict=True))
    gate, up = product(h, GATE), product(h, UP)
    if name == "gated_matmul":
        return (gate * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up,)
    return (residual + product(gate / (1 + np.exp(-gate)) * up, DOWN),)


def operands(rows):
    return normal(rows, K), normal(rows, 24), NORM


@pytest.mark.grid
@pytest.mark.parametrize("fused", [None, False], ids=["fused", "chain"])
@pytest.mark.parametrize("name", CALLS)
def test_equals_the_definition(name, fused):
    a = operands(3)
    with jq.implementation(activations="f32", fused=fused):
        got = CALLS[name](*a)
    for y, want in zip(got, exact(name, *a), strict=True):
        assert y.dtype == jnp.float32
        assert nmse(y, want) <= 1e-11


@pytest.mark.grid
@pytest.mark.parametrize("rows", [1, 3, 5, 20, 65])  # mat-vecs; tensor cores with int8 and f16
@pytest.mark.parametrize("name", CALLS)
def test_simulated_kernels_equal_the_reference(name, rows):
    a = operands(rows)
    simulated = jq.implementation("sim")(CALLS[name])
    quantized = zip(
        simulated(*a, activations="q8_1"), CALLS[name](*a, activations="q8_1"), strict=True
    )
    assert all(nmse(got, want) <= 1e-9 for got, want in quantized)
    fastest = zip(simulated(*a), CALLS[name](*a, activations="f32"), strict=True)
    assert all(nmse(got, want) <= (1e-6 if rows > 16 else 1e-3) for got, want in fastest)


@pytest.mark.parametrize("name", CALLS)
def test_simulated_kernels_of_f32_activations(name):
    a = operands(2)
    for got, want in zip(
        jq.implementation("sim")(CALLS[name])(*a, activations="f32"), exact(name, *a), strict=True
    ):
        assert nmse(got, want) <= 1e-10


@pytest.mark.slow("compiles a program for each case", quick=["mlp", "qkv_matmul"])
@pytest.mark.parametrize("name", CALLS)
def test_a_non_finite_value_spoils_only_its_row(name):
    x, residual, norm_weight = operands(3)
    clean = jq.implementation("sim")(CALLS[name])(x, residual, norm_weight)
    spoiled = jq.implementation("sim")(CALLS[name])(x.at[1, 77].set(jnp.nan), residual, norm_weight)
    for got, want in zip(spoiled, clean, strict=True):
        assert not jnp.isfinite(got[1]).any()
        np.testing.assert_array_equal(got[jnp.array([0, 2])], want[jnp.array([0, 2])])


@pytest.mark.parametrize("name", CALLS)
def test_one_operation_unless_switched_off(name):
    def names(fused):
        with jq.implementation(fused=fused):
            jaxpr = jax.make_jaxpr(CALLS[name])(*operands(2))
        return [e.primitive.name for e in jaxpr.eqns if e.primitive.name in NAMES]

    assert names(None) == names((name,)) == ["mlp" if name == "mlp" else "linear"]
    chain = names(False)
    assert "packed_matmul" in chain and "linear" not in chain and "mlp" not in chain
    if name == "mlp":  # its parts are separate operations
        assert names(("gated_matmul", "matmul")) == ["linear", "linear"]


def test_jit_traces_again_where_the_fusions_change():
    traced = []

    @jax.jit
    def f(x):
        traced.append(x)
        return jq.mlp(x, GATE, UP, DOWN)

    for fused in (None, ("mlp",), False, ["mlp"], ()):
        with jq.implementation(fused=fused):
            f(jnp.ones((1, K)))
    assert len(traced) == 3


@pytest.mark.slow("compiles a program for each case", quick=["matmul-native"])
@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CALLS)
def test_derivatives_are_those_of_the_chain(name, implementation):
    a, along = operands(2), operands(2)
    call = jq.implementation(implementation)(CALLS[name])
    with jq.implementation(fused=False):
        want_tangents = jax.jvp(functools.partial(CALLS[name], activations="f32"), a, along)[1]
        ys, pull = jax.vjp(functools.partial(CALLS[name], activations="f32"), *a)
        cotangents = tuple(normal(*y.shape) for y in ys)
        want = pull(cotangents)
    values, tangents = jax.jvp(call, a, along)
    # q8_1: a difference in the last bit may round an activation to the next int8
    for value, plain in zip(values, call(*a), strict=True):
        assert nmse(value, plain) <= (1e-12 if implementation == "xla" else 1e-5)
    # with more than one product, rounding to q8_1 moves the point where the derivative is taken
    tolerance = 1e-9 if implementation == "xla" else 1e-3
    for got, expected in zip(tangents, want_tangents, strict=True):
        assert nmse(got, expected) <= tolerance
    for got, expected in zip(jax.vjp(call, *a)[1](cotangents), want, strict=True):
        assert nmse(got, expected) <= tolerance


@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_takes_one_forward_pass(name):
    def loss(*a):
        return sum(jnp.sum(y**2) for y in CALLS[name](*a))

    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(*operands(2)).jaxpr
    ours = [e for e in jaxpr.eqns if e.primitive.name in NAMES]
    assert {e.primitive.name for e in ours} == {"packed_matmul"}
    matrices = {"qkv_matmul": 3, "gated_matmul": 2, "mlp": 3}.get(name, 1)
    assert [e.params["transposed"] for e in ours] == [False] * matrices + [True] * matrices


def test_transposes_are_those_of_dense_products():
    x, residual = normal(2, K), normal(2, 24)
    dense = [np.asarray(w.dequantize(), np.float64) for w in QKV]
    cotangents = tuple(normal(2, w.shape[0]) for w in QKV)
    (got,) = jax.linear_transpose(lambda x: jq.qkv_matmul(x, QKV), x)(cotangents)
    assert (
        nmse(got, sum(np.asarray(c) @ w for c, w in zip(cotangents, dense, strict=True))) <= 1e-11
    )

    def layer(x, residual, bias):
        return jq.linear(x, [DOWN], residual=residual, biases=[bias])[0]

    along = normal(2, 24)
    got = jax.linear_transpose(layer, x, residual, jnp.ones(24))(along)
    want = np.asarray(along) @ np.asarray(DOWN.dequantize(), np.float64), along, along.sum(0)
    for one, expected in zip(got, want, strict=True):
        assert nmse(one, expected) <= 1e-11
    # JAX transposes the linear part of an affine function
    (got,) = jax.linear_transpose(lambda x: layer(x, residual, jnp.ones(24)), x)(along)
    assert nmse(got, want[0]) <= 1e-11


@pytest.mark.parametrize("name", ["rms_norm_matmul", "qkv_matmul", "gated_matmul", "mlp"])
def test_nonlinear_functions_have_no_transpose(name):
    x, residual, norm_weight = operands(2)
    cotangents = CALLS[name](x, residual, norm_weight)
    transpose = jax.linear_transpose(lambda x: CALLS[name](x, residual, norm_weight), x)
    with pytest.raises(NotImplementedError, match="needs a function that is linear.*use jax.vjp"):
        transpose(cotangents)


@pytest.mark.slow("compiles second derivatives")
@pytest.mark.parametrize("name", ["qkv_matmul", "mlp"])
def test_second_derivative_is_that_of_the_chain(name):
    x, residual, norm_weight = operands(2)
    v = normal(2, K)

    def hessian_product(fused):
        def loss(x):
            return sum(jnp.sum(jnp.sin(y)) for y in CALLS[name](x, residual, norm_weight))

        with jq.implementation(activations="f32", fused=fused):
            return jax.jvp(jax.grad(loss), (x,), (v,))[1]

    assert nmse(hessian_product(None), hessian_product(False)) <= 1e-9


@pytest.mark.parametrize("name", CALLS)
def test_vmap_of_rows_is_one_call(name):
    x, residual, norm_weight = normal(3, 2, K), normal(3, 2, 24), NORM
    mapped = jax.vmap(CALLS[name], in_axes=(0, 0, None))
    got = mapped(x, residual, norm_weight)
    flat = CALLS[name](x.reshape(6, K), residual.reshape(6, 24), norm_weight)
    for y, want in zip(got, flat, strict=True):
        np.testing.assert_array_equal(y, want.reshape(y.shape))
    assert "scan" not in str(jax.make_jaxpr(mapped)(x, residual, norm_weight))
    shared = jax.vmap(CALLS[name], in_axes=(0, None, None))(x, residual[0], norm_weight)
    for i in range(3):
        for y, want in zip(shared, CALLS[name](x[i], residual[0], norm_weight), strict=True):
            assert nmse(y[i], want) <= 1e-11


def test_vmap_of_norm_weights():
    x, norms = normal(3, 2, K), jnp.stack([NORM, NORM * 2, NORM[::-1]])
    got = jax.vmap(lambda x, g: jq.rms_norm_matmul(x, g, DOWN, eps=EPS))(x, norms)
    for i in range(3):
        assert nmse(got[i], jq.rms_norm_matmul(x[i], norms[i], DOWN, eps=EPS)) <= 1e-12


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float_weights_among_packed_ones(implementation):
    x, bias = normal(2, K), normal(32)
    dense = tuple(
        jnp.asarray(w.dequantize(), dtype)
        for w, dtype in zip(QKV, (jnp.float32, jnp.bfloat16), strict=False)
    )
    got = jq.implementation(implementation)(jq.qkv_matmul)(
        x,
        (*dense, QKV[2]),
        biases=(bias, None, None),
        activations="f32",
    )
    for y, w, b in zip(got, (*dense, QKV[2].dequantize()), (bias, 0, 0), strict=True):
        assert (
            nmse(
                y,
                np.asarray(x, np.float64) @ np.asarray(w, np.float64).T + np.asarray(b, np.float64),
            )
            <= 1e-11
        )
    gate, up, down = (w.dequantize() for w in (GATE, UP, DOWN))
    got = jq.implementation(implementation)(jq.mlp)(x, gate, up, down, norm_weight=NORM, eps=EPS)
    assert nmse(got, exact("mlp", x, jnp.zeros((2, 24)), NORM)[0]) <= 1e-11


@pytest.mark.slow("compiles a program for each case", quick=["bfloat16"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_results_have_the_dtype_of_x(dtype):
    x, residual = normal(2, 3, K, dtype=dtype), normal(2, 3, 24, dtype=dtype)
    for name, call in CALLS.items():
        want = exact(name, x.astype(jnp.float32), residual.astype(jnp.float32), NORM)
        for y, expected in zip(call(x, residual, NORM, activations="f32"), want, strict=True):
            assert y.dtype == dtype and y.shape == expected.shape
            assert nmse(y, expected) <= 1e-5


def test_no_rows_and_no_leading_axes():
    for shape in ((0,), (2, 0), ()):
        for call in CALLS.values():
            for y in call(jnp.ones((*shape, K)), jnp.ones((*shape, 24)), NORM):
                assert y.shape[:-1] == shape


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x: jq.matmul(x, DOWN, bias=jnp.ones(23)),
            ValueError,
            r"bias has shape \(23,\).*\(24,\)",
        ),
        (
            lambda x: jq.matmul(x, DOWN, residual=jnp.ones((3, 24))),
            ValueError,
            r"residual has shape \(3, 24\).*\(2, 24\)",
        ),
        (lambda x: jq.matmul(x, DOWN, bias=jnp.ones(24, int)), TypeError, "bias has dtype int"),
        (
            lambda x: jq.rms_norm_matmul(x, jnp.ones(8), DOWN, eps=EPS),
            ValueError,
            r"norm_weight has shape \(8,\)",
        ),
        (lambda x: jq.rms_norm_matmul(x, NORM, DOWN, eps=-1.0), ValueError, "eps=-1.0"),
        (
            lambda x: jq.qkv_matmul(x, QKV, norm_weight=NORM),
            ValueError,
            "eps=None must be a number",
        ),
        (
            lambda x: jq.qkv_matmul(x, QKV, biases=(jnp.ones(32),)),
            ValueError,
            "biases has 1 elements.*3 matrices",
        ),
        (lambda x: jq.qkv_matmul(x, ()), ValueError, r"weights=\(\)"),
        (lambda x: jq.qkv_matmul(x[:, :32], QKV), ValueError, r"x has shape \(2, 32\)"),
        (
            lambda x: jq.qkv_matmul(x, (GATE, jnp.ones((2, 3, K)))),
            ValueError,
            r"weights\[1\] has shape \(2, 3, 256\)",
        ),
        (lambda x: jq.qkv_matmul(x, QKV, activations="int8"), ValueError, "activations='int8'"),
        (
            lambda x: jq.gated_matmul(x, GATE, DOWN),
            ValueError,
            r"up has shape \(24, 256\).*gate's shape",
        ),
        (
            lambda x: jq.gated_matmul(x, GATE, UP, activation="relu"),
            ValueError,
            "activation='relu' must be one of silu",
        ),
        (
            lambda x: jq.gated_matmul(x, GATE, UP, activation=[]),
            ValueError,
            r"activation=\[\] must be one of silu",
        ),
        (
            lambda x: jq.qkv_matmul(x, (GATE, UP), biases=(None, jnp.ones(3))),
            ValueError,
            r"biases\[1\].* \(n,\) = ",
        ),
        (
            lambda x: jq.rms_norm_matmul(x, jnp.ones(K), GATE, eps=1e300),
            ValueError,
            "finite in float32",
        ),
        (
            lambda x: jax.jit(lambda eps: jq.rms_norm_matmul(x, jnp.ones(K), GATE, eps=eps))(1e-5),
            TypeError,
            "eps is of type .*Tracer; it must be a static number",
        ),
        (
            lambda x: jq.mlp(x, DOWN, DOWN, DOWN),
            ValueError,
            r"down has shape \(24, 256\); it must be \(n, 24\)",
        ),
        (lambda x: jq.mlp(x, GATE, UP, DOWN, residual=x), ValueError, "residual has shape"),
        (lambda x: jq.mlp(x, GATE, UP, 3), TypeError, "down has dtype int32"),
    ],
)
def test_arguments_that_do_not_fit(call, error, message):
    with pytest.raises(error, match=message):
        call(jnp.ones((2, K)))


@pytest.mark.parametrize("call", [jq.linear, jq.qkv_matmul])
def test_no_bias_of_any_matrix_is_no_biases(call):
    x = normal(2, K, dtype=jnp.bfloat16)
    for weights in ((DOWN,), (GATE, DOWN)):
        biases = (None,) * len(weights)
        with_them = jax.make_jaxpr(lambda x, w=weights, b=biases: call(x, w, biases=b))(x)
        without = jax.make_jaxpr(lambda x, w=weights: call(x, w))(x)
        assert str(with_them) == str(without)


@pytest.mark.parametrize("eps", [np.array(1e-6), -1.0, "no number"])
def test_eps_without_a_norm_is_not_looked_at(eps):
    x = normal(2, K)
    np.testing.assert_array_equal(jq.mlp(x, GATE, UP, DOWN, eps=eps), jq.mlp(x, GATE, UP, DOWN))
    np.testing.assert_array_equal(
        jax.jit(lambda x, eps: jq.mlp(x, GATE, UP, DOWN, eps=eps))(x, 1e-6),
        jax.jit(lambda x: jq.mlp(x, GATE, UP, DOWN))(x),
    )
    np.testing.assert_array_equal(
        jq.gated_matmul(x, GATE, UP, eps=eps), jq.gated_matmul(x, GATE, UP)
    )


@pytest.mark.parametrize(
    ("call", "matrix"),
    [
        (lambda x: jq.matmul(x, GATE), "w"),
        (lambda x: jq.linear(x, (GATE,)), "w"),
        (lambda x: jq.qkv_matmul(x, (GATE, UP)), "weights[0]"),
        (lambda x: jq.gated_matmul(x, GATE, UP), "gate"),
        (lambda x: jq.mlp(x, GATE, UP, DOWN), "gate"),
    ],
)
def test_rows_of_another_length(call, matrix):
    for shape in ((2, 32), ()):
        rule = f"x has shape {shape}; its last axis must be k=256, as in {matrix} (256, 256)"
        with pytest.raises(ValueError, match=re.escape(rule)):
            call(jnp.ones(shape))


def test_the_matrix_that_differs_is_named():
    rule = r"must be k=32, as in weights\[1\] \(4, 32\)"
    with pytest.raises(ValueError, match=rule):
        jq.qkv_matmul(jnp.ones((2, K)), (GATE, jnp.ones((4, 32))))
    with pytest.raises(TypeError, match="up is"):
        jq.gated_matmul(jnp.ones((2, K)), GATE, "no matrix")


@pytest.mark.parametrize("fused", [3, True, [1]])
def test_fusions_that_are_no_names(fused):
    with (
        pytest.raises(ValueError, match=r"fused=\w+ must be a collection of matmul"),
        jq.implementation(fused=fused),
    ):
        pass


@pytest.mark.parametrize("fused", [("mlp", "attention"), {"attention"}, "attention"])
def test_unknown_fusions(fused):
    rule = "fused='attention' must be a collection of matmul, rms_norm_matmul"
    with pytest.raises(ValueError, match=rule), jq.implementation(fused=fused):
        pass
