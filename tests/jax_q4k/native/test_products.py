"""Products with the CPU kernels, against float64, for every available instruction set."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import oracles
from support.format_lists import PRODUCTS
from support.helpers import nmse
from support.oracles import gated

import jax_q4k as jq
from jax_q4k import QuantizedArray
from jax_q4k.native import calls
from ptx_kernels import formats


def matrix(format, n, k, kind="random", seed=0):
    """Returns (packed, float64) weights (n, k)."""
    rng = np.random.default_rng(seed)
    planes = oracles.random_planes(rng, format, n, k // formats.get(format).block_size, kind=kind)
    return QuantizedArray.tree_unflatten(format, tuple(map(jnp.asarray, planes))), oracles.weights(
        format, planes
    )


def activations(m, k, seed=1):
    return np.random.default_rng(seed).standard_normal((m, k)).astype(np.float32)


def seen(x, quantized):
    """x as products use it, in float64."""
    return oracles.dequantized(*oracles.quantized(x)) if quantized else x.astype(np.float64)


def columns(format, spans, blocks):
    """256 * spans columns, plus `blocks` of 32 if the format's rows may end there."""
    return 256 * spans + (32 * blocks if formats.get(format).block_size == 32 else 0)


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("format", PRODUCTS)
def test_every_format_and_number_of_rows(kernels, format):
    for n, m, spans, blocks in [
        (1, 1, 1, 0),
        (37, 3, 0, 3),
        (67, 4, 2, 1),
        (130, 7, 1, 5),
        (70, 11, 1, 3),
        (70, 33, 3, 7),
        (65, 130, 1, 0),
    ]:
        k = columns(format, spans, blocks) or 256
        w, exact = matrix(format, n, k)
        x = activations(m, k)
        for quantized in (True, False):
            (y,) = calls.linear(jnp.asarray(x), [w], quantized=quantized)
            assert nmse(y, seen(x, quantized) @ exact.T) <= 1e-10, (n, m, k, quantized)


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_float_weights(kernels, dtype):
    """Rows that end within a vector, a span and a tile, together with another matrix."""
    for n, m, k in [
        (1, 1, 7),
        (37, 2, 300),
        (33, 4, 531),
        (70, 5, 250),
        (66, 13, 1030),
        (7, 40, 9),
    ]:
        w = jnp.asarray(np.random.default_rng(k).standard_normal((n, k)), dtype)
        x = activations(m, k)
        y, again = calls.linear(jnp.asarray(x), [w, w[: n // 2 + 1]], quantized=False)
        exact = x.astype(np.float64) @ np.asarray(w).astype(np.float64).T
        assert nmse(y, exact) <= 1e-12, (n, m, k)
        np.testing.assert_array_equal(again, np.asarray(y)[:, : n // 2 + 1])
        rows = np.asarray(calls.embedding(jnp.array([n - 1, 0], jnp.int32), w))
        np.testing.assert_array_equal(rows, np.asarray(w)[[n - 1, 0]].astype(np.float32))


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("format", PRODUCTS)
def test_float_activations_see_decoded_weights(kernels, format):
    """Each column of the identity gives a column of the matrix, with few rows and with many."""
    w, exact = matrix(format, 35, columns(format, 1, 1))
    k = exact.shape[1]
    eye = jnp.eye(k, dtype=jnp.float32)
    decoded = np.asarray(calls.embedding(jnp.arange(35, dtype=jnp.int32), w))
    (many,) = calls.linear(eye, [w], quantized=False)
    np.testing.assert_array_equal(many, decoded.T)
    for first in (0, 100, k - 3):
        (few,) = calls.linear(eye[first : first + 3], [w], quantized=False)
        np.testing.assert_array_equal(few, decoded.T[first : first + 3])


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("kind", ["extreme", "zero", "full"])
@pytest.mark.parametrize("format", PRODUCTS)
def test_extreme_weights(kernels, format, kind):
    w, exact = matrix(format, 33, columns(format, 2, 3), kind)
    for m in (1, 6, 9):
        x = activations(m, exact.shape[1])
        for quantized in (True, False):
            (y,) = calls.linear(jnp.asarray(x), [w], quantized=quantized)
            assert nmse(y, seen(x, quantized) @ exact.T) <= 1e-10


def test_more_rows_than_one_unpacking_serves(kernels):
    """A tile of weights is unpacked again for every 512 rows of activations."""
    w, exact = matrix("Q4_K", 66, 256)
    x = activations(530, 256)
    (y,) = calls.linear(jnp.asarray(x), [w], quantized=True)
    assert nmse(y, seen(x, True) @ exact.T) <= 1e-10


@functools.cache  # the float64 reference takes longer than all kernels
def hundred_thousand_blocks(format):
    """Packed weights with extreme scales, three rows of activations, and their products."""
    w, exact = matrix(format, 391, 256 * formats.get(format).block_size, "extreme")
    x = activations(3, exact.shape[1])
    return w, jnp.asarray(x), seen(x, True) @ exact.T


@pytest.mark.slow("multiplies many blocks of each format", quick=["*-Q4_K", "*-Q6_K"])
@pytest.mark.parametrize("format", PRODUCTS)
def test_a_hundred_thousand_random_blocks(kernels, format):
    w, x, want = hundred_thousand_blocks(format)
    many = jnp.tile(x, (3, 1))  # uses tiles of unpacked rows
    for given in (x[:1], x, many):
        (y,) = calls.linear(given, [w], quantized=True)
        assert nmse(y, np.tile(want, (3, 1))[: len(given)]) <= 1e-10


def test_random_shapes(kernels):
    rng = np.random.default_rng(7)
    shapes = [
        (int(rng.integers(1, 300)), int(rng.integers(1, 131)), int(rng.integers(1, 21)))
        for _ in range(6)
    ]
    for i, (n, m, blocks) in enumerate([*shapes, (4099, 1, 1), (4099, 130, 1)]):
        format = PRODUCTS[i % len(PRODUCTS)]
        w, exact = matrix(format, n, columns(format, 0, blocks) or 256)
        x = activations(m, exact.shape[1])
        (y,) = calls.linear(jnp.asarray(x), [w], quantized=True)
        assert nmse(y, seen(x, True) @ exact.T) <= 1e-10, (format, n, m, blocks)


@pytest.mark.parametrize("m", [2, 18])
def test_norm_biases_and_residual(kernels, m):
    k, x = 512, activations(m, 512)
    (q, exact_q), (v, exact_v) = matrix("Q4_K", 48, k), matrix("Q6_K", 17, k, seed=5)
    weight, bias, residual = (
        np.random.default_rng(i).standard_normal(s, np.float32)
        for i, s in enumerate([k, 48, (m, 17)])
    )
    normalized = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, -1, keepdims=True) + 1e-5) * weight
    options = {"quantized": False, "norm_weight": jnp.asarray(weight), "eps": 1e-5}
    both = calls.linear(jnp.asarray(x), [q, v], biases=[jnp.asarray(bias), None], **options)
    assert nmse(both[0], normalized @ exact_q.T + bias) <= 1e-10
    assert nmse(both[1], normalized @ exact_v.T) <= 1e-10
    (y,) = calls.linear(jnp.asarray(x), [v], residual=jnp.asarray(residual), **options)
    assert nmse(y, residual + normalized @ exact_v.T) <= 1e-10


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("activation", jq.ACTIVATION_FUNCTIONS)
@pytest.mark.parametrize("m", [1, 19])
def test_gate_and_up(kernels, activation, m):
    (gate, exact_gate), (up, exact_up) = matrix("Q4_K", 70, 512), matrix("Q5_K", 70, 512, seed=3)
    x = activations(m, 512) * 4  # some exceed the limits of swiglu_oai
    (y,) = calls.linear(jnp.asarray(x), [gate, up], quantized=True, activation=activation)
    g, u = (seen(x, True) @ exact.T for exact in (exact_gate, exact_up))
    assert (g > 7).any() and (g < 7).any() and (abs(u) > 7).any() and (abs(u) < 7).any()
    assert nmse(y, gated(activation, g, u)) <= 1e-10


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("m", [1, 270])
def test_the_whole_network(kernels, m, quantized):
    """270 rows are more than one pass takes."""
    k, inner = 256, 320
    (gate, exact_gate), (up, exact_up) = matrix("Q5_0", inner, k), matrix("Q5_0", inner, k, seed=3)
    down, exact_down = matrix("Q8_0", 40, inner, seed=4)
    x, residual, weight = activations(m, k), activations(m, 40), activations(1, k)[0]
    options = {"norm_weight": jnp.asarray(weight), "eps": 1e-5, "activation": "silu"}
    (h,) = calls.linear(jnp.asarray(x), [gate, up], quantized=quantized, **options)
    normalized = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, -1, keepdims=True) + 1e-5) * weight
    g = seen(normalized.astype(np.float32), quantized) @ exact_gate.T
    u = seen(normalized.astype(np.float32), quantized) @ exact_up.T
    # rounding in the norm may round an int8 the other way
    assert nmse(h, g / (1 + np.exp(-g)) * u) <= 1e-6
    for quantized_down in (True, False):
        given = {"quantized": (quantized, quantized_down), "residual": jnp.asarray(residual)}
        y = calls.mlp(jnp.asarray(x), gate, up, down, **given, **options)
        want = seen(np.asarray(h), quantized_down) @ exact_down.T
        assert nmse(y - residual, want) <= (1e-6 if quantized_down else 1e-9)


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("m", [2, 20])
@pytest.mark.parametrize("quantized", [True, False])
def test_a_bad_activation_spoils_its_row_alone(kernels, value, m, quantized):
    w, exact = matrix("Q4_K", 40, 512)
    x = activations(m, 512)
    x[1, 300] = value
    (y,) = calls.linear(jnp.asarray(x), [w], quantized=quantized)
    assert not np.isfinite(np.asarray(y)[1]).any()
    others = np.delete(np.arange(m), 1)
    assert nmse(np.asarray(y)[others], seen(x[others], quantized) @ exact.T) <= 1e-10


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("format", [f for f in PRODUCTS if formats.get(f).block_size < 256])
def test_a_bad_scale_spoils_its_row_alone(kernels, format):
    # A row that ends within a span of 256 columns is read on into the next row.
    k = 256 + 2 * formats.get(format).block_size
    w, exact = matrix(format, 5, k)
    bad = [plane.at[2].set(255) for plane in w.planes]  # NaN if scales are floats
    x, spoilt = activations(1, k), QuantizedArray.tree_unflatten(format, tuple(bad))
    (y,) = calls.linear(jnp.asarray(x), [spoilt], quantized=True)
    others = np.delete(np.arange(5), 2)
    assert nmse(y[:, others], (seen(x, True) @ exact.T)[:, others]) <= 1e-10


@pytest.mark.parametrize("m", [2, 20])
def test_activations_next_to_nothing(kernels, m):
    """127 / 1e-37 is infinite in float32, and 0 times that is NaN."""
    w, _ = matrix("Q4_K", 40, 512)
    x = np.zeros((m, 512), np.float32)
    x[:, ::32] = 1e-37
    (y,) = calls.linear(jnp.asarray(x), [w], quantized=True)
    assert np.abs(np.asarray(y)).max() < 1e-33


def test_a_row_that_ends_within_a_span_after_bad_ones(kernels):
    """Memory that another call has filled is not part of a row."""
    long, _ = matrix("Q8_0", 40, 512)
    short, exact = matrix("Q8_0", 40, 96)
    for m in (2, 20):
        x = activations(m, 96)
        calls.linear(jnp.full((m, 512), np.inf), [long], quantized=True)[0].block_until_ready()
        (y,) = calls.linear(jnp.asarray(x), [short], quantized=True)
        assert nmse(y, seen(x, True) @ exact.T) <= 1e-10


def test_subnormal_scales_and_weights(kernels):
    """MXFP4's exponents 0 to 3 with every kernel; XLA's threads flush subnormals to zero."""
    rng = np.random.default_rng(0)
    qs, e = (rng.integers(0, high, (40, 8, size), np.uint8) for high, size in ((256, 16), (4, 1)))
    w = QuantizedArray.tree_unflatten("MXFP4", (jnp.asarray(qs), jnp.asarray(e)))
    exact = oracles.weights("MXFP4", (qs, e))
    assert (np.abs(exact[exact != 0]) < np.finfo(np.float32).tiny).mean() > 0.1
    y = np.asarray(calls.embedding(jnp.arange(40, dtype=jnp.int32), w))
    np.testing.assert_array_equal(y, exact.astype(np.float32))
    for m in (1, 3, 7, 40):
        x = activations(m, 256) * np.float32(2**100)
        for quantized in (True, False):
            (y,) = calls.linear(jnp.asarray(x), [w], quantized=quantized)
            assert nmse(y, seen(x, quantized) @ exact.T) <= 1e-10, (m, quantized)
    tiny = np.full((1, 256), 1e-39, np.float32)  # the thread flushes again afterwards
    assert not np.asarray(jax.jit(lambda x: x * 0.5)(tiny)).any()


def test_rows_of_a_table(kernels):
    for format in PRODUCTS:
        w, exact = matrix(format, 9, columns(format, 1, 2))
        y = np.asarray(calls.embedding(jnp.array([3, -1, 8, 9, 0], jnp.int32), w))
        np.testing.assert_array_equal(y[[0, 2, 4]], exact[[3, 8, 0]].astype(np.float32))
        assert np.isnan(y[[1, 3]]).all()


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("blocks", [5, 8 * 19 + 1])  # one part of a row, and two of them
@pytest.mark.parametrize("format", PRODUCTS)
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(kernels, format, blocks):
    w, _ = matrix(format, 37, columns(format, blocks // 8, blocks % 8) or 256)
    x = jnp.asarray(activations(33, w.shape[1]))
    multiply = jax.jit(lambda x: calls.linear(x, [w], quantized=True)[0])
    whole = np.asarray(multiply(x))
    for rows in (1, 2, 3, 5, 8, 9, 16, 17):
        for first in (0, 33 - rows):
            part = np.asarray(multiply(x[first : first + rows]))
            assert (part.view(np.int32) == whole[first : first + rows].view(np.int32)).all(), rows


@pytest.mark.parametrize("columns", [31 * 256, 32 * 256, 33 * 256, 70 * 256])
def test_bits_do_not_depend_on_how_many_rows_fit_the_cache(kernels, columns):
    """Long rows are read in passes, which end elsewhere for other numbers of rows."""
    for format in ("Q4_K", "Q6_K", "Q8_0"):
        w, exact = matrix(format, 19, columns)
        x = activations(9, columns)
        whole = np.asarray(calls.linear(jnp.asarray(x), [w], quantized=True)[0])
        assert nmse(whole, seen(x, True) @ exact.T) <= 1e-10
        for rows in (1, 2, 4, 8):
            part = calls.linear(jnp.asarray(x[:rows]), [w], quantized=True)[0]
            np.testing.assert_array_equal(part, whole[:rows])


@pytest.mark.parametrize("m", [3, 19])
def test_bits_of_a_network_do_not_depend_on_the_number_of_rows(kernels, m):
    gate, up = (matrix("Q4_K", 320, 512, seed=seed)[0] for seed in (1, 2))
    down = matrix("Q8_0", 40, 320, seed=3)[0]
    x, weight = jnp.asarray(activations(m, 512)), jnp.asarray(activations(1, 512)[0])
    options = {"quantized": (True, True), "norm_weight": weight, "eps": 1e-5, "activation": "silu"}
    whole = np.asarray(calls.mlp(x, gate, up, down, **options))
    for i in range(m):
        row = calls.mlp(x[i : i + 1], gate, up, down, **options)
        np.testing.assert_array_equal(np.asarray(row)[0], whole[i])


def test_float_results_do_not_depend_on_the_call(kernels):
    """Results of a row do not depend on the other rows, up to 4 rows and beyond."""
    w, _ = matrix("Q4_K", 300, 1024)
    x = jnp.asarray(activations(40, 1024))
    multiply = jax.jit(lambda x: calls.linear(x, [w], quantized=False)[0])
    whole, few = np.asarray(multiply(x)), np.asarray(multiply(x[:4]))
    np.testing.assert_array_equal(np.asarray(multiply(x)), whole)
    for start, stop in [(8, 40), (3, 10), (5, 22)]:
        np.testing.assert_array_equal(np.asarray(multiply(x[start:stop])), whole[start:stop])
    for start, stop in [(0, 1), (1, 3), (1, 4)]:
        np.testing.assert_array_equal(np.asarray(multiply(x[start:stop])), few[start:stop])
    assert nmse(few, whole[:4]) <= 1e-12
