import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.format_lists import FEW_ARE_QUICK, PRODUCTS
from support.helpers import nmse

import jax_q4k as jq
from jax_q4k.ops import backends
from jax_q4k.ops.packed_matmul import op as matmul_op
from jax_q4k.ops.packed_matmul import takes_q8_1
from ptx_kernels import formats, tuning

from .random_weights import random_weights

rng = np.random.default_rng(0)


def f64_product(x, w):
    return np.asarray(x).astype(np.float64) @ np.asarray(w.dequantize()).astype(np.float64).T


@FEW_ARE_QUICK
@pytest.mark.parametrize("format", PRODUCTS)
def test_equals_product_with_decoded_weights(format):
    w = random_weights(format, 24, 512)
    x = rng.standard_normal((2, 3, 512)).astype(np.float32)
    y = jq.matmul(x, w, activations="f32")
    assert y.shape == (2, 3, 24) and y.dtype == jnp.float32
    assert nmse(y, f64_product(x, w)) <= 1e-12


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_result_has_the_dtype_of_x_and_f32_accumulation(dtype):
    w = random_weights("Q4_K", 16, 1024)
    x = jnp.asarray(rng.standard_normal((4, 1024)), dtype)
    y = jq.matmul(x, w, activations="f32")
    assert y.dtype == dtype
    want = jnp.asarray(f64_product(x, w), jnp.float32).astype(dtype)
    assert nmse(y, want) <= 1e-6


def test_float_weights():
    w = jnp.asarray(rng.standard_normal((8, 40)), jnp.bfloat16)
    x = rng.standard_normal((3, 40)).astype(np.float32)
    assert nmse(jq.matmul(x, w), x.astype(np.float64) @ np.asarray(w).astype(np.float64).T) <= 1e-12


@pytest.mark.parametrize("shape", [(0, 256), (3, 0, 256)])
def test_no_rows(shape):
    assert jq.matmul(jnp.zeros(shape), random_weights("Q4_K", 5, 256)).shape == (*shape[:-1], 5)


def test_one_row_without_leading_axes():
    w = random_weights("Q6_K", 5, 256)
    x = rng.standard_normal(256).astype(np.float32)
    assert nmse(jq.matmul(x, w, activations="f32"), f64_product(x, w)) <= 1e-12


@FEW_ARE_QUICK
@pytest.mark.grid
@pytest.mark.parametrize("rows", [8, 9])
@pytest.mark.parametrize("format", PRODUCTS)
def test_q8_1_is_the_product_of_the_quantized_rows(format, rows):
    w = random_weights(format, 12, 512)
    x = rng.standard_normal((rows, 512)).astype(np.float32)
    values, scale_sum = jq.quantize_q8_1(x)
    groups = np.asarray(values, np.float64).reshape(rows, 16, 32) * np.asarray(
        scale_sum[..., :1], np.float64
    )
    got = jq.matmul(x, w, activations="q8_1")
    assert nmse(got, f64_product(groups.reshape(rows, 512), w)) <= 1e-12
    error = nmse(got, f64_product(x, w))
    assert 1e-6 <= error <= 1e-3  # activations were quantized


def test_q8_1_applies_only_where_a_kernel_takes_it():
    assert (
        takes_q8_1("Q4_K", 8, 256) and takes_q8_1("Q6_K", 4096, 256) and takes_q8_1("Q5_0", 8, 96)
    )
    assert takes_q8_1("Q5_0", 9, 128) and not takes_q8_1("Q5_0", 9, 96)
    x = rng.standard_normal((9, 96)).astype(np.float32)
    w = random_weights("Q5_0", 6, 96)
    np.testing.assert_array_equal(
        *(jq.matmul(x, w, activations=activations) for activations in ("q8_1", "f32"))
    )


@pytest.mark.slow(
    "repeats for each format what others do for all of them", quick=["*Q4_0*", "*MXFP4*"]
)
@pytest.mark.parametrize("format", PRODUCTS)
def test_simulated_kernels_of_rows_that_are_no_multiple_of_256(format):
    """Formats with blocks of 32 weights stand in for the others.

    The others are tested with multiples of 256.
    """
    k = 96 if formats.get(format).block_size == 32 else 256
    w = random_weights(format, 7, k)
    x = rng.standard_normal((3, k)).astype(np.float32)
    with jq.implementation("sim"):
        got = jq.matmul(x, w)
    assert nmse(got, jq.matmul(x, w, activations="q8_1")) <= 1e-12


@pytest.mark.parametrize(("activations", "least", "most"), [(None, 0, 1e-6), ("q8_1", 1e-6, 1e-3)])
def test_many_rows_are_float16_only_where_nobody_asked_for_int8(activations, least, most):
    """The device is an H200 with a single multiprocessor, which one block fills.

    The block has 256 weight rows and 48 activations.
    """
    w = random_weights("Q4_K", 256, 256)
    x = jnp.asarray(rng.standard_normal((48, 256)), jnp.float32)
    params = dict(activations=activations, transposed=False)
    program = jax.jit(lambda x, w: backends.composition(matmul_op, "sim")(x, w, **params))
    with tuning.on_device(tuning.target("NVIDIA H200", 1)):
        got = program(x, w)
    assert least <= nmse(got, f64_product(x, w)) <= most


def test_context_selects_the_activations_and_retraces_jit():
    w = random_weights("Q4_K", 6, 256)
    x = rng.standard_normal((2, 256)).astype(np.float32)
    program = jax.jit(jq.matmul)
    with jq.implementation(activations="f32"):
        plain = program(x, w)
    with jq.implementation(activations="q8_1"):
        quantized = program(x, w)
        explicit = jq.matmul(x, w, activations="f32")
    np.testing.assert_array_equal(quantized, jq.matmul(x, w, activations="q8_1"))
    np.testing.assert_array_equal(explicit, plain)
    assert np.any(np.asarray(plain) != np.asarray(quantized))


@pytest.mark.parametrize("activations", ["f32", "q8_1"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poison_stays_in_its_row(activations, poison):
    w = random_weights("Q4_K", 6, 256)
    x = rng.standard_normal((3, 256)).astype(np.float32)
    clean = jq.matmul(x, w, activations=activations)
    x[1, 77] = poison
    got = np.asarray(jq.matmul(x, w, activations=activations))
    assert not np.isfinite(got[1]).any()
    np.testing.assert_array_equal(got[[0, 2]], clean[jnp.array([0, 2])])


def test_inside_scan_and_while_loop():
    w = random_weights("Q4_K", 256, 256)
    x = rng.standard_normal((2, 256)).astype(np.float32)

    @jax.jit
    def scanned(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(jq.matmul(x, w)), None), x, length=3)[0]

    @jax.jit
    def looped(x, w):
        return jax.lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(jq.matmul(c[1], w))), (0, x)
        )[1]

    want = x
    for _ in range(3):
        want = jnp.tanh(jq.matmul(want, w))
    assert nmse(scanned(x, w), want) <= 1e-10
    assert nmse(looped(x, w), want) <= 1e-10


def test_stacked_weights_scanned_over_their_leading_axis():
    layers = [random_weights("Q4_K", 256, 256, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *planes: jnp.stack(planes), *layers)
    x = rng.standard_normal((2, 256)).astype(np.float32)
    got, _ = jax.lax.scan(lambda x, w: (jnp.tanh(jq.matmul(x, w)), None), x, stacked)
    want = x
    for w in layers:
        want = jnp.tanh(jq.matmul(want, w))
    assert nmse(got, want) <= 1e-10


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda w: jq.matmul(jnp.zeros((2, 255)), w), ValueError, r"x has shape \(2, 255\).*k=256"),
        (lambda w: jq.matmul(jnp.zeros(()), w), ValueError, r"x has shape \(\)"),
        (
            lambda w: jq.matmul(jnp.zeros((2, 256), jnp.int32), w),
            TypeError,
            "x has dtype int32.*float32",
        ),
        (lambda w: jq.matmul(w, w), TypeError, "x is a QuantizedArray"),
        (
            lambda w: jq.matmul(jnp.zeros((2, 8)), jnp.zeros((2, 3, 8))),
            ValueError,
            r"w has shape \(2, 3, 8\)",
        ),
        (
            lambda w: jq.matmul(jnp.zeros((2, 8)), jnp.zeros((3, 8), jnp.int8)),
            TypeError,
            "w has dtype int8",
        ),
        (
            lambda w: jq.matmul(jnp.zeros((2, 256)), w, activations="int8"),
            ValueError,
            "activations='int8'",
        ),
        (
            lambda w: jq.implementation("cuda")(jq.matmul)(jnp.zeros((2, 256)), w),
            ValueError,
            "implementation='cuda'",
        ),
    ],
)
def test_arguments_that_do_not_fit(call, error, message):
    w = random_weights("Q4_K", 4, 256)
    with pytest.raises(error, match=message):
        call(w)
    with pytest.raises(error, match=message):
        jax.jit(lambda: call(w)).trace()


def test_explicit_ptx_without_a_gpu_raises():
    with pytest.raises(jq.UnavailableError, match="needs a CUDA device"):
        jq.implementation("ptx")(jq.matmul)(jnp.zeros((1, 256)), random_weights("Q4_K", 4, 256))
