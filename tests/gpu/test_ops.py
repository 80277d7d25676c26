"""Every operation with PTX kernels on the GPU, compared with plain JAX on the GPU or the CPU."""

from __future__ import annotations

import types

import numpy as np
import pytest
from support.helpers import nmse

from ptx_kernels import formats
from ptx_kernels.kernels.operands import random_blocks

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-6
FORMATS = formats.names()
DTYPES = ("float32", "bfloat16", "float16")
#: Results with 8 or 11 bits of mantissa: a tie may round differently, which adds one rounding.
ROUNDED = {"float32": TOLERANCE, "bfloat16": 2e-5, "float16": 1e-6}


@pytest.fixture(scope="module")
def jq() -> types.ModuleType:
    import jax_q4k

    return jax_q4k


def weights(jq, format: str, n: int, k: int, seed: int = 0):

    raw = random_blocks(
        format, (n, k // formats.get(format).block_size), np.random.default_rng(seed)
    )
    return jq.QuantizedArray.from_gguf_bytes(raw.tobytes(), format, (n, k))


def activations(shape: tuple[int, ...], dtype: str = "float32", seed: int = 1):
    import jax.numpy as jnp

    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def run(implementation: str, platform: str, function, *arguments, **options):
    """Jits the function, runs it on a platform's first device, and returns float32 NumPy arrays."""
    import jax

    import jax_q4k as jq

    device = jax.devices(platform)[0]
    jitted = jax.jit(lambda *args: jq.implementation(implementation)(function)(*args, **options))
    with jax.default_device(device):
        leaves = jax.tree.leaves(jitted(*jax.device_put(arguments, device)))
    assert {d for leaf in leaves for d in leaf.devices()} == {device}
    return [np.asarray(leaf.astype("float32")) for leaf in leaves]


def both(function, *arguments, **options):
    """Returns the results of PTX and of plain JAX on the GPU."""
    return (
        run("ptx", "gpu", function, *arguments, **options),
        run("xla", "gpu", function, *arguments, **options),
    )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 7, 8, 9, 33])
def test_matmul(jq, format, m):
    w, x = weights(jq, format, 200, 768), activations((m, 768))
    for mode in ("q8_1", "f32"):
        (got,), (want,) = both(jq.matmul, x, w, activations=mode)
        assert got.shape == (m, 200)
        assert nmse(got, want) <= TOLERANCE


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("m", [1, 16])
def test_gradient_of_matmul(jq, format, m):
    import jax

    w, x, cotangent = (
        weights(jq, format, 64, 768),
        activations((m, 768)),
        activations((m, 64), seed=2),
    )
    gradient = jax.jit(lambda x, w: jax.vjp(lambda x: jq.matmul(x, w), x)[1](cotangent)[0])(x, w)
    exact = np.asarray(cotangent, np.float64) @ np.asarray(w.dequantize(), np.float64)
    assert nmse(gradient, exact) <= 1e-11


@pytest.mark.parametrize("format", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("n, k", [(4096, 4096), (4096, 14336), (1, 256), (31, 2304)])
def test_matmul_shapes(jq, format, n, k):
    (got,), (want,) = both(
        jq.matmul, activations((1, k)), weights(jq, format, n, k), activations="q8_1"
    )
    assert nmse(got, want) <= TOLERANCE


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_dtypes(jq, dtype):
    (got,), (want,) = both(
        jq.matmul, activations((2, 512), dtype), weights(jq, "Q4_K", 96, 512), activations="q8_1"
    )
    assert nmse(got, want) <= ROUNDED[dtype]


def test_a_nan_reaches_its_row_only(jq):
    import jax.numpy as jnp

    w, x = weights(jq, "Q4_K", 64, 512), activations((3, 512))
    x = x.at[1, 7].set(jnp.nan)
    (got,), _ = both(jq.matmul, x, w, activations="q8_1")
    assert np.isnan(got[1]).all() and np.isfinite(got[[0, 2]]).all()


@pytest.mark.parametrize("m", [1, 2, 4, 8, 9])
def test_fused_matmuls(jq, m):
    """The mat-vec normalizes and quantizes few rows itself; another kernel prepares more rows.

    Nine rows take a chain of kernels.
    """
    import jax.numpy as jnp

    x, residual, bias = (
        activations((m, 3072)),
        activations((m, 96), seed=2),
        activations((96,), seed=3),
    )
    norm = jnp.abs(activations((3072,), seed=4))
    formats = ("Q4_K", "Q6_K", "Q8_0")
    q, k, v = (
        weights(jq, f, n, 3072, i)
        for i, (f, n) in enumerate(zip(formats, (96, 33, 64), strict=True))
    )
    gate, up, down = (
        weights(jq, "Q4_K", 512, 3072),
        weights(jq, "Q5_K", 512, 3072),
        weights(jq, "Q6_K", 96, 512),
    )
    options = {"eps": 1e-5, "activations": "q8_1"}
    results = [
        both(jq.rms_norm_matmul, x, norm, q, bias=bias, residual=residual, **options),
        both(
            lambda *a, **o: jq.qkv_matmul(a[0], a[1:4], norm_weight=a[4], **o),
            x,
            q,
            k,
            v,
            norm,
            **options,
        ),
        both(jq.gated_matmul, x, gate, up, norm_weight=norm, activation="gelu", **options),
        both(jq.mlp, x / 64, gate, up, down, residual=residual, activations="q8_1"),
    ]
    for got, want in results:
        for result, expected in zip(got, want, strict=True):
            # a tie of the rounding to int8 may round the other way
            assert nmse(result, expected) <= 1e-5


@pytest.mark.parametrize("shape", [(1, 4096), (5, 96), (3, 30)])
def test_rms_norm(jq, shape):
    (got,), (want,) = both(
        jq.rms_norm, activations(shape), activations(shape[-1:], seed=2), eps=1e-5
    )
    assert nmse(got, want) <= 1e-11


@pytest.mark.parametrize("dtype", [*DTYPES, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_append(jq, dtype, interleaved):
    import jax.numpy as jnp

    pages, new = activations((20, 2, 16, 96), seed=1).astype(dtype), activations((5, 2, 96), seed=3)
    scales = {name: jnp.ones((20, 2, 16)) for name in ("k_scales", "v_scales") if dtype == "int8"}
    angles = activations((5, 40), seed=4)
    norms = {
        "q_norm": activations((96,), seed=5),
        "k_norm": activations((96,), seed=6),
        "eps": 1e-6,
    }
    slots = jnp.array([0, 319, -1, 17, 200])
    arrays = (
        activations((5, 6, 96)),
        new,
        -new,
        pages,
        pages,
        slots,
        jnp.cos(angles),
        jnp.sin(angles),
    )
    got, want = both(jq.rope_append, *arrays, interleaved=interleaved, **norms, **scales)
    for result, expected in zip(got, want, strict=True):
        # narrow types may round neighbors of a tie either way
        assert nmse(result, expected) <= 1e-4


@pytest.mark.parametrize("time", [1, 75])
@pytest.mark.parametrize("tiled", [False, True])
def test_gated_delta_rule(jq, time, tiled):
    import jax
    import jax.numpy as jnp

    q, k = (activations((3, time, 2, 128), seed=seed) for seed in (1, 2))
    k /= jnp.linalg.norm(k, axis=-1, keepdims=True)
    v, gates = activations((3, time, 6, 64), seed=3), activations((3, time, 6), seed=4)
    state = activations((3, 6, 128, 64), seed=5)
    arrays = q, k, v, -jnp.exp(gates), jax.nn.sigmoid(gates), state
    got, want = both(jq.gated_delta_rule, *arrays, tiled=tiled)
    for result, expected in zip(got, want, strict=True):
        assert nmse(result, expected) <= 1e-10


@pytest.mark.parametrize("tiled", [False, True])
def test_gated_delta_step(jq, tiled):
    import jax.numpy as jnp

    given = [
        activations(shape, seed=seed)
        for seed, shape in enumerate(
            ((4, 896), (4, 384), (4, 6), (4, 6), (4, 4, 896), (4, 6, 128, 64))
        )
    ]
    got, want = both(
        jq.gated_delta_step,
        *(*given, jnp.array([0, 1, -1, 1000])),
        conv_weight=activations((896, 4), seed=7),
        dt_bias=activations((6,), seed=8),
        decay=-jnp.exp(activations((6,), seed=9)),
        norm_weight=activations((64,), seed=10),
        eps=1e-6,
        tiled=tiled,
    )
    for result, expected in zip(got, want, strict=True):
        assert nmse(result, expected) <= 1e-10


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4096), (7, 96)])
def test_quantize_q8_1(jq, shape, dtype):
    x = activations(shape, dtype)
    values, scale_sum = run("ptx", "gpu", jq.quantize_q8_1, x)
    # the reference runs on the CPU: XLA's float32 division on a GPU is approximate and moves 0.15 %
    # of values
    want_values, want_scale_sum = run("xla", "cpu", jq.quantize_q8_1, x)
    # a last-bit difference in x * (127 / amax) may move a tie by one step, but not further
    assert np.abs(values - want_values).max() <= 1 and np.mean(values != want_values) <= 1e-3
    assert nmse(scale_sum[..., 0], want_scale_sum[..., 0]) <= TOLERANCE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_dequantize(jq, format, dtype):
    (got,), (want,) = both(jq.dequantize, weights(jq, format, 40, 1024), dtype=dtype)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("format", FORMATS)
def test_embedding(jq, format):
    import jax.numpy as jnp

    ids = jnp.array([[3, 0, 99], [100, -1, 50]])
    (got,), (want,) = both(jq.embedding, ids, weights(jq, format, 100, 768))
    np.testing.assert_array_equal(got, want)
    assert np.isnan(got[1, :2]).all() and np.isfinite(got[0]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_append_kv(jq, dtype):
    import jax.numpy as jnp

    pages = (20, 2, 16, 96)
    k_pages, v_pages = activations(pages, dtype, 1), activations(pages, dtype, 2)
    k, v = activations((5, 2, 96), seed=3), activations((5, 2, 96), seed=4)
    slots = jnp.array([0, 319, -1, 17, 200])
    got, want = both(jq.append_kv, k_pages, v_pages, k, v, slots)
    for result, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [*range(32, 257, 32), 384, 512])
def test_paged_attention_head_dims(jq, dtype, head_dim):
    check_attention(jq, dtype, head_dim, num_heads=8, num_kv_heads=2)


@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (6, 2), (14, 2), (18, 2), (32, 8)])
def test_paged_attention_groups(jq, num_heads, num_kv_heads):
    check_attention(jq, "bfloat16", 128, num_heads, num_kv_heads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [16, 128])
def test_latent_pages(jq, num_heads, dtype):
    """Appends and attends to rows of 576 elements, the first 512 of which are values."""
    import jax.numpy as jnp

    pages, k = activations((9, 1, 16, 576), dtype, 1), activations((3, 1, 576), seed=3)
    slots, tables = jnp.array([17, 0, 143]), jnp.arange(9)[None]
    (got,), (want,) = both(jq.append_kv, pages, None, k, None, slots)
    np.testing.assert_array_equal(got, want)
    q = activations((1, num_heads, 576)) * 0.1
    lengths = jnp.array([140])
    (got,), (want,) = both(jq.paged_attention, q, pages, None, tables, lengths, value_dim=512)
    assert nmse(got, want) <= TOLERANCE


def check_attention(jq, dtype: str, head_dim: int, num_heads: int, num_kv_heads: int) -> None:
    """Lengths of 0, 1, a full table, and one in between.

    Unused pages and the unused tails of pages are poisoned.
    """
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    page_size, per_sequence, num_pages = 16, 9, 48
    lengths = np.array([0, 1, per_sequence * page_size, 77])
    tables = rng.permutation(num_pages)[: 4 * per_sequence].reshape(4, per_sequence)
    pages = np.full((2, num_pages, num_kv_heads, page_size, head_dim), np.nan, np.float32)
    for sequence, length in enumerate(lengths):
        for token in range(length):
            page = tables[sequence, token // page_size]
            pages[:, page, :, token % page_size] = rng.standard_normal((2, num_kv_heads, head_dim))
    k_pages, v_pages = (jnp.asarray(p).astype(dtype) for p in pages)
    q = activations((4, num_heads, head_dim))
    (got,), (want,) = both(
        jq.paged_attention, q, k_pages, v_pages, jnp.asarray(tables), jnp.asarray(lengths)
    )
    assert not got[0].any()
    assert nmse(got, want) <= TOLERANCE


def test_pages_are_updated_in_place_inside_a_loop(jq):
    """Appends 64 tokens one by one in a `while_loop` with donated pages, then attends to them."""
    import jax
    import jax.numpy as jnp

    k = activations((64, 2, 64), seed=5)
    tables, q = jnp.arange(4)[None], activations((1, 4, 64))

    def run(implementation: str):
        def step(state):
            i, k_pages, v_pages = state
            new = jax.lax.dynamic_slice_in_dim(k, i, 1)
            return i + 1, *jq.implementation(implementation)(jq.append_kv)(
                k_pages, v_pages, new, -new, i[None]
            )

        @jax.jit
        def program(k_pages, v_pages):
            _, k_pages, v_pages = jax.lax.while_loop(
                lambda s: s[0] < 64, step, (jnp.int32(0), k_pages, v_pages)
            )
            return jq.implementation(implementation)(jq.paged_attention)(
                q, k_pages, v_pages, tables, jnp.array([64])
            )

        empty = jnp.full((4, 2, 16, 64), jnp.nan)
        return np.asarray(program(empty, empty))

    assert nmse(run("ptx"), run("xla")) <= TOLERANCE
