"""Products with one matrix of a stack equal those with its slice, without copying it."""

from __future__ import annotations

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from support.format_lists import FEW_ARE_QUICK, PRODUCTS
from support.helpers import nmse
from support.implementations import IMPLEMENTATIONS, NATIVE, needs_native

import jax_q4k as jq
from ptx_kernels import formats

from .random_weights import random_weights

LAYERS, N = 3, 256


def stack(format, n=N, k=N, seed=0):
    each = [random_weights(format, n, k, seed + i) for i in range(LAYERS)]
    return jax.tree.map(lambda *planes: jnp.stack(planes), *each)


def normal(*shape):
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), jnp.float32)


W, V = stack("Q4_K"), stack("Q6_K", seed=7)
NORM, BIAS = normal(N), normal(N, 1)[:, 0]

#: Calls of x, two matrices, and options.
FAMILY = {
    "matmul": lambda x, w, v, **o: jq.matmul(x, w, **o),
    "around": lambda x, w, v, **o: jq.matmul(x, w, bias=BIAS, residual=x, **o),
    "rms_norm_matmul": lambda x, w, v, **o: jq.rms_norm_matmul(x, NORM, w, eps=1e-5, **o),
    "qkv_matmul": lambda x, w, v, **o: jq.qkv_matmul(x, (w, v), norm_weight=NORM, eps=1e-5, **o),
    "gated_matmul": lambda x, w, v, **o: jq.gated_matmul(x, w, v, **o),
    "linear": lambda x, w, v, **o: jq.linear(x, (w, v), biases=(BIAS, None), **o),
    "mlp": lambda x, w, v, **o: jq.mlp(x, w, v, w, residual=x, **o),
}


@pytest.mark.slow("compiles a program for each case", quick=["native-rows=1"])
@pytest.mark.grid
@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_bits_are_those_of_the_slices(implementation, rows):
    x = normal(rows, N)

    def whole_family(w, v, **index):
        return {name: function(x, w, v, **index) for name, function in FAMILY.items()}

    with jq.implementation(implementation):
        got = jax.jit(lambda w, v, i: whole_family(w, v, index=i))(W, V, 1)
        want = jax.jit(whole_family)(W[1], V[1])
    jax.tree.map(np.testing.assert_array_equal, got, want)


@FEW_ARE_QUICK
@pytest.mark.grid
@needs_native
@pytest.mark.cpu_kernels
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("format", PRODUCTS)
def test_formats_on_the_cpu(format, rows):
    w = stack(format, 5, 3 * formats.get(format).block_size)
    x = normal(rows, w.shape[-1])
    for i in range(LAYERS):
        np.testing.assert_array_equal(jq.matmul(x, w, index=i), jq.matmul(x, w[i]))


def test_many_rows_of_matrices_that_begin_within_a_word_are_sliced():
    w, x = stack("Q6_K", 5), normal(12, N)
    with jq.implementation("sim"):
        np.testing.assert_array_equal(jq.matmul(x, w, index=1), jq.matmul(x, w[1]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_traced_index_is_taken_as_dynamic_index_in_dim_takes_it(implementation):
    x = normal(2, N)
    with jq.implementation(implementation):
        product = jax.jit(lambda i: jq.matmul(x, W, index=i))
        each = [jq.matmul(x, w) for w in W]
        for i in (-9, -LAYERS - 1, -1, 0, LAYERS, 1 << 30):
            layer = jax.lax.dynamic_index_in_dim(jnp.arange(LAYERS), i, keepdims=False)
            np.testing.assert_array_equal(product(i), each[layer])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: jq.matmul(x, W, index=3), IndexError, "index=3 is out of range for 3 layers"),
        (lambda x: jq.matmul(x, W, index=np.int64(-4)), IndexError, "index=-4"),
        (lambda x: jq.matmul(x, W, index=1.0), TypeError, "index has dtype float"),
        (lambda x: jq.matmul(x, W, index=True), TypeError, "index has dtype bool"),
        (lambda x: jq.matmul(x, W, index=jnp.arange(2)), ValueError, r"index.*\(2,\).*jax.vmap"),
        (
            lambda x: jq.matmul(x, W[0], index=0),
            ValueError,
            r"w has shape \(256, 256\).*three axes",
        ),
        (lambda x: jq.matmul(x, W), ValueError, r"w has shape \(3, 256, 256\).*index="),
        (lambda x: jq.matmul(x, W[:0], index=0), ValueError, r"\(0, 256, 256\).*a layer"),
        (lambda x: jq.matmul(x, W[0].T, index=0), TypeError, "transposed view"),
        (lambda x: jq.matmul(x[:, :8], W, index=0), ValueError, r"k=256, as in w \(256, 256\)"),
        (lambda x: jq.mlp(x, W, W, W[:2], index=0), ValueError, "down has 2 layers; gate has 3"),
        (
            lambda x: jq.qkv_matmul(x, (W, W.dequantize()[0]), index=0),
            ValueError,
            r"weights\[1\] has shape \(256, 256\)",
        ),
    ],
)
def test_arguments_that_do_not_fit(call, error, message):
    with pytest.raises(error, match=message):
        jax.eval_shape(call, normal(1, N))


def test_float_stacks():
    w, x = normal(LAYERS, 8, N), normal(2, N)
    gradient = jax.jit(jax.grad(lambda w, i: jq.matmul(x, w, index=i).sum()))(w, 2)
    assert nmse(jq.matmul(x, w, index=2), np.asarray(x, np.float64) @ np.asarray(w[2]).T) <= 1e-12
    assert nmse(gradient[2], jnp.broadcast_to(x.sum(0), (8, N))) <= 1e-12
    assert not gradient[:2].any()


# --- loops over layers ---


def looped(x, w, at):
    """Applies layers in sequence; `at(w, i)` returns the keywords of a product with layer i."""
    return jax.lax.fori_loop(0, LAYERS, lambda i, x: jnp.tanh(jq.matmul(x, **at(w, i))), x)


def indexed(w, i):
    return {"w": w, "index": i}


def sliced(w, i):
    return {"w": w[i]}


def scanned(x, w):
    def layer(x, i):
        return x + jq.mlp(jq.rms_norm_matmul(x, NORM, w, eps=1e-5, index=i), w, w, w, index=i), None

    return jax.lax.scan(layer, x, jnp.arange(LAYERS))[0]


@pytest.mark.slow("compiles a program for each case", quick=["rows=1"])
@needs_native
@pytest.mark.cpu_kernels
@pytest.mark.parametrize("rows", [1, 12])
def test_a_loop_copies_no_layer(rows):
    x = normal(rows, N)

    def compiled(function):
        program = jax.jit(function).lower(x, W).compile()
        return program.memory_analysis().temp_size_in_bytes, re.findall(
            r"= u8\[.*?\].*?(\S+)\(", program.as_text()
        )

    layer = W.nbytes // LAYERS
    temp, made = compiled(functools.partial(looped, at=sliced))
    assert temp >= layer and any("slice" in instruction for instruction in made)
    for function in (functools.partial(looped, at=indexed), scanned):
        temp, made = compiled(function)
        assert temp < layer and set(made) <= {"parameter", "get-tuple-element"}
    np.testing.assert_array_equal(looped(x, W, indexed), looped(x, W, sliced))


@pytest.mark.slow("compiles a program for each case", quick=["sim"])
@pytest.mark.parametrize("implementation", [NATIVE, "sim"])
def test_gradients_through_a_loop(implementation):
    def gradient(x, w, in_place):
        def layer(x, i):
            a, index = (w, {"index": i}) if in_place else (w[i], {})
            h = jnp.tanh(jq.matmul(x, a, **index) / 64)
            return x + jnp.tanh(jq.mlp(h / 8, a, a, a, **index) / 64), None

        return jax.grad(lambda x: jnp.sum(jax.lax.scan(layer, x, jnp.arange(LAYERS))[0] ** 2))(x)

    x, run = normal(2, N), jax.jit(gradient, static_argnums=2)
    with jq.implementation(implementation, activations="f32"):
        got, want = (run(x, W, in_place) for in_place in (True, False))
    dense = run(x, W.dequantize(), False)
    np.testing.assert_array_equal(got, want)
    assert nmse(got, dense) <= 1e-10 and nmse(2 * x, dense) >= 1e-3


# --- vmap, explain, export ---


@pytest.mark.slow("compiles a program for each case", quick=["native"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_mapped_indices_and_rows(implementation):
    """Gathers experts, and runs examples of one expert in a single call."""
    x, experts = normal(4, 2, N), jnp.array([2, 0, 2, 1])
    with jq.implementation(implementation):
        each = [jq.matmul(rows, W[i]) for rows, i in zip(x, experts, strict=True)]
        gathered = jax.vmap(lambda x, i: jq.matmul(x, W, index=i))(x, experts)
        np.testing.assert_array_equal(gathered, jnp.stack(each))
        of_one = jax.vmap(lambda i: jq.matmul(x[0], W, index=i))(experts)
        np.testing.assert_array_equal(of_one[0], each[0])
        np.testing.assert_array_equal(of_one[3], jq.matmul(x[0], W[1]))
        rows = jax.vmap(lambda x: jq.matmul(x, W, index=1))(x)
        np.testing.assert_array_equal(rows, jq.matmul(x, W[1]))
    text = str(jax.make_jaxpr(jax.vmap(lambda x: jq.matmul(x, W, index=1)))(x))
    assert "scan" not in text and text.count("packed_matmul") == 1


@needs_native
@pytest.mark.cpu_kernels
def test_mapped_matrices_are_not_copied():
    x = normal(LAYERS, 2, N)
    program = jax.jit(jax.vmap(lambda x, w: jq.mlp(x, w, w, w))).lower(x, W).compile()
    assert program.memory_analysis().temp_size_in_bytes < W.nbytes // LAYERS
    want = jnp.stack([jq.mlp(rows, w, w, w) for rows, w in zip(x, W, strict=True)])
    np.testing.assert_array_equal(program(x, W), want)


def test_some_mapped_matrices_and_mapped_stacks():
    x = normal(2, N)
    with jq.implementation("sim"):
        q, k = jax.vmap(lambda w: jq.qkv_matmul(x, (w, V[0])))(W)
        want = [jq.qkv_matmul(x, (w, V[0])) for w in W]
        for got, each in ((q, [a for a, _ in want]), (k, [b for _, b in want])):
            np.testing.assert_array_equal(got, jnp.stack(each))
        stacks = jax.tree.map(lambda *planes: jnp.stack(planes), W, W[::-1])
        got = jax.vmap(lambda w: jq.matmul(x, w, index=2))(stacks)
        np.testing.assert_array_equal(got, jnp.stack([jq.matmul(x, W[2]), jq.matmul(x, W[0])]))


def test_explain():
    found = jq.explain(functools.partial(looped, at=indexed), normal(1, N), W, platform="cuda")
    (call,) = found.calls
    assert call.operands == ("f32[1,256]", "Q4_K[3,256,256]", "i32[]")
    (kernel,) = call.kernels
    assert (kernel.family, kernel.arguments["layers"]) == ("matvec", LAYERS)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_export(platform):
    x = normal(1, N)
    exported = jax.export.export(
        jax.jit(lambda x, w, i: jq.matmul(x, w, index=i)),
        platforms=[platform],
        disabled_checks=jq.EXPORT_CHECKS,
    )(x, W, 1)
    assert exported.in_avals[-1].shape == ()
    if platform == "cpu":
        np.testing.assert_array_equal(exported.call(x, W, 2), jq.matmul(x, W[2]))
