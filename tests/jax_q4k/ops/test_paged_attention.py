import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import oracles
from support.helpers import nmse
from support.implementations import IMPLEMENTATIONS

import jax_q4k as jq

rng = np.random.default_rng(3)


def attention(q, k_pages, v_pages, block_tables, context_lens, scale=None, **options):
    """Computes the definition token by token in float64."""
    arrays = (np.asarray(a) for a in (q, k_pages, v_pages, block_tables, context_lens))
    return oracles.attention(*arrays, q.shape[-1] ** -0.5 if scale is None else scale, **options)


def arrays(
    batch=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    page_size=16,
    per_sequence=3,
    dtype=jnp.float32,
):
    num_pages = batch * per_sequence + 2
    q = jnp.asarray(rng.standard_normal((batch, num_heads, head_dim)), jnp.float32)
    shape = (num_pages, num_kv_heads, page_size, head_dim)
    k_pages, v_pages = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    block_tables = rng.permutation(num_pages)[: batch * per_sequence].reshape(batch, per_sequence)
    return q, k_pages, v_pages, block_tables


@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (4, 2), (7, 1), (32, 8)])
@pytest.mark.parametrize("head_dim, page_size", [(64, 16), (96, 32)])
def test_equals_the_definition(num_heads, num_kv_heads, head_dim, page_size):
    q, k_pages, v_pages, tables = arrays(4, num_heads, num_kv_heads, head_dim, page_size)
    lens = np.array([1, page_size, page_size + 1, 3 * page_size])
    got = jax.jit(jq.paged_attention)(q, k_pages, v_pages, tables, lens)
    assert got.shape == q.shape and got.dtype == jnp.float32
    assert nmse(got, attention(q, k_pages, v_pages, tables, lens)) <= 1e-12


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_pages_and_a_scale(dtype):
    q, k_pages, v_pages, tables = arrays(dtype=dtype)
    lens = np.array([5, 17, 33, 48])
    got = jq.paged_attention(q, k_pages, v_pages, tables, lens, scale=0.3)
    assert nmse(got, attention(q, k_pages, v_pages, tables, lens, 0.3)) <= 1e-12


def quantized(pages, dtype):
    """Quantizes pages like `append_kv`: (rows, scales or None, decoded values)."""
    if dtype != jnp.int8:
        rows = pages.astype(dtype)
        return rows, None, np.asarray(rows.astype(jnp.float32))
    rows, scales = oracles.int8_vectors(np.asarray(pages))
    return jnp.asarray(rows), jnp.asarray(scales), rows * scales[..., None].astype(np.float64)


def latent(dtype, heads=16, head_dim=288, value_dim=256, num_kv_heads=1):
    """Returns (q, pages, scales, tables), decoded keys, and the values at their start."""
    q, pages, _, tables = arrays(4, heads, num_kv_heads, head_dim)
    rows, scales, keys = quantized(pages, dtype)
    return (q, rows, scales, tables), keys, keys[..., :value_dim]


@pytest.mark.slow(
    "compiles a program for each case",
    quick=["heads=6-head_dim=96-*-float32-native"],
)
@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", jq.PAGE_DTYPES, ids=str)
@pytest.mark.parametrize(
    "heads, head_dim, value_dim, num_kv_heads",
    [(16, 576, 512, 1), (20, 288, 256, 1), (6, 96, 64, 2), (3, 64, 64, 1)],
)
def test_latent_pages(heads, head_dim, value_dim, num_kv_heads, dtype, implementation):
    """One array, whose rows begin with the values; slots outside of contexts are not read."""
    (q, pages, scales, tables), keys, values = latent(
        dtype, heads, head_dim, value_dim, num_kv_heads
    )
    lens = np.array([0, 20, 33, 48])
    want = attention(q, keys, values, tables, lens, 0.1)
    if dtype == jnp.int8:
        scales = scales.at[tables[0]].set(jnp.nan)
    else:
        pages = pages.at[tables[0]].set(jnp.nan)
    call = jax.jit(
        lambda q, pages, scales: jq.paged_attention(
            q, pages, None, tables, lens, k_scales=scales, value_dim=value_dim, scale=0.1
        )
    )
    with jq.implementation(implementation):
        got = call(q.astype(jnp.bfloat16).astype(jnp.float32), pages, scales)
        half = call(q.astype(jnp.bfloat16), pages, scales)
    want = attention(q.astype(jnp.bfloat16).astype(jnp.float32), keys, values, tables, lens, 0.1)
    assert got.shape == (4, heads, value_dim) and nmse(got, want) <= 1e-11
    assert half.dtype == jnp.bfloat16 and nmse(half, want) <= 1e-5


@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", [dict(window=20, soft_cap=1.5), dict(window=1)], ids="-".join)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_options_of_latent_pages(dtype, options, implementation):
    (q, pages, scales, tables), keys, values = latent(dtype, 4, 96, 32)
    lens = np.array([0, 20, 33, 48])
    options = options | dict(sinks=np.array([0.5, -1.0, 3.0, -np.inf], np.float32))
    got = jq.implementation(implementation)(jq.paged_attention)(
        q, pages, None, tables, lens, k_scales=scales, value_dim=32, **options
    )
    assert nmse(got, attention(q, keys, values, tables, lens, **options)) <= 1e-11


@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("time", [None, 3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_queries_in_two_arrays(dtype, time, implementation):
    """Elements of latent queries beyond the values' may be an array of their own."""
    (q, pages, scales, tables), _, _ = latent(dtype, 4, 96, 32)
    q = q if time is None else jnp.stack([q, 2 * q, -q], axis=1)
    args = pages, None, tables, np.array([3, 20, 33, 48])
    with jq.implementation(implementation):
        attend = functools.partial(jq.paged_attention, k_scales=scales, value_dim=32)
        want = attend(q, *args)
        got = attend(q[..., :32], *args, q_rest=q[..., 32:])
    np.testing.assert_array_equal(got, want)


@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("per_sequence", [3, 16])  # a cluster splits sixteen pages
@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gated_results(dtype, clusters, per_sequence, implementation):
    q, pages, v_pages, tables = arrays(2, 6, 2, 96, per_sequence=per_sequence)
    pages, v_pages, gate = pages.astype(dtype), v_pages.astype(dtype), q[:, ::-1] * 3
    args = pages, v_pages, tables, np.array([0, 16 * per_sequence])
    with jq.implementation(implementation, clusters=clusters):
        plain = jq.paged_attention(q, *args)
        got = jq.paged_attention(q, *args, gate=gate)
        half = jq.paged_attention(q.astype(jnp.bfloat16), *args, gate=gate.astype(jnp.bfloat16))
    want = np.asarray(plain, np.float64) / (1 + np.exp(-np.asarray(gate, np.float64)))
    assert nmse(got, want) <= 1e-12
    assert half.dtype == jnp.bfloat16 and nmse(half, want) <= 1e-3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(q_rest=jnp.zeros((4, 16, 31))), ValueError, "q_rest has shape .*last axis of 32"),
        (dict(q=jnp.zeros((4, 16, 64))), ValueError, r"q has shape .*head_dim=32"),
        (dict(gate=jnp.zeros((4, 16, 64))), ValueError, "gate has shape .*last axis of 32"),
        (dict(gate=jnp.zeros((4, 16, 32), int)), TypeError, "gate has dtype int"),
        (dict(value_dim=None, v_pages=jnp.zeros((14, 1, 16, 64))), TypeError, "v_pages is given"),
    ],
)
def test_queries_and_gates_that_do_not_fit(change, error, message):
    (q, pages, _, tables), _, _ = latent(jnp.float32, 16, 64, 32)
    good = dict(q=q[..., :32], q_rest=q[..., 32:], k_pages=pages, v_pages=None, value_dim=32)
    good |= dict(block_tables=tables, context_lens=np.array([1, 2, 3, 4]))
    with pytest.raises(error, match=message):
        jq.paged_attention(**(good | change))


def test_groups_and_vmap_of_latent_pages():
    (q, pages, _, tables), keys, values = latent(jnp.float32, 4, 96, 32)
    lens = np.array([48, 20, 33, 1])
    attend = functools.partial(jq.paged_attention, value_dim=32)
    want = attention(q, keys, values, tables, lens)
    twice = jax.vmap(lambda q: attend(q, pages, None, tables, lens))(jnp.stack([q, 2 * q]))
    assert nmse(twice, [want, attention(2 * q, keys, values, tables, lens)]) <= 1e-11
    own = np.stack([tables[:2] % 7, tables[2:] % 7])  # 14 pages in two groups
    both = np.concatenate([own[0], own[1] + 7])
    got = attend(q, pages, None, own, lens)
    assert nmse(got, attention(q, keys, values, both, lens)) <= 1e-11


def test_no_sequences_over_latent_pages():
    (q, pages, _, _), _, _ = latent(jnp.float32)
    tables, lens = jnp.zeros((0, 3), jnp.int32), jnp.zeros(0, jnp.int32)
    got = jq.paged_attention(q[:0], pages, None, tables, lens, value_dim=256)
    assert got.shape == (0, 16, 256)


def test_long_contexts_of_latent_pages_are_split_by_the_kernels():
    q, pages, _, tables = arrays(2, 16, 1, 96, 64, per_sequence=16)
    lens = np.array([0, 900])
    call = jax.jit(jq.implementation("sim")(functools.partial(jq.paged_attention, value_dim=64)))
    lowered = call.lower(q, pages, None, tables, lens).as_text()
    assert lowered.count("custom_call @") == 2  # the second merges
    want = attention(q, pages, np.asarray(pages)[..., :64], tables, lens)
    assert nmse(call(q, pages, None, tables, lens), want) <= 1e-11


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(value_dim=None), TypeError, "value_dim=None with v_pages None"),
        (dict(v_pages=jnp.zeros((14, 1, 16, 64))), TypeError, "value_dim=32 with v_pages given"),
        (dict(value_dim=48), ValueError, "value_dim=48 must be a multiple of 32, at most head_dim"),
        (dict(value_dim=0), ValueError, "value_dim=0 must be a multiple of 32"),
        (dict(value_dim=96), ValueError, "value_dim=96 must be .* at most head_dim=64"),
        (
            dict(value_dim=32.0),
            TypeError,
            "value_dim is of type float; it must be a static integer",
        ),
        (dict(k_pages=jnp.zeros((14, 1, 16, 48))), ValueError, "head_dim=48 must be .*32, 64, 96"),
        (dict(k_pages=jnp.zeros((14, 1, 16, 608))), ValueError, "head_dim=608 must be .*544, 576"),
        (dict(k_pages=jnp.zeros((14, 1, 8, 64))), ValueError, "page_size=8 must be a multiple"),
        (dict(k_pages=jnp.zeros((14, 0, 16, 64))), ValueError, "no axis may be empty"),
        (dict(k_pages=jnp.zeros((14, 16, 64))), ValueError, "k_pages has shape"),
        (dict(k_pages=jnp.zeros((14, 1, 16, 64), jnp.int8)), TypeError, "int8 k_pages needs k_sca"),
        (dict(k_scales=jnp.zeros((14, 1, 16))), TypeError, "k_scales belongs to int8 k_pages"),
        (dict(v_scales=jnp.zeros((14, 1, 16))), TypeError, "v_scales belongs to v_pages, which is"),
        (dict(q=jnp.zeros((4, 16, 32))), ValueError, "q has shape .*head_dim=64"),
    ],
)
def test_latent_arguments_that_do_not_fit(change, error, message):
    (q, pages, _, tables), _, _ = latent(jnp.float32, 16, 64, 32)
    good = dict(q=q, k_pages=pages, v_pages=None, block_tables=tables, value_dim=32)
    with pytest.raises(error, match=message):
        jq.paged_attention(**(good | dict(context_lens=np.array([1, 2, 3, 4])) | change))


OPTIONS = [
    dict(window=1),
    dict(window=20, soft_cap=1.5),
    dict(sinks=np.array([0.5, -1.0, 3.0, -np.inf], np.float32)),
    dict(window=33, soft_cap=30.0, sinks=np.zeros(4, np.float32)),
]


@pytest.mark.slow("compiles a program for each case", quick=["float8_e4m3fn-native"])
@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", jq.PAGE_DTYPES, ids=str)
def test_heads_of_512_dimensions(dtype, implementation):
    q, k_pages, v_pages, tables = arrays(3, 16, 2, 512)
    (k, k_scales, keys), (v, v_scales, values) = (quantized(p, dtype) for p in (k_pages, v_pages))
    lens, scales = np.array([0, 20, 48]), dict(k_scales=k_scales, v_scales=v_scales)
    scale = 512**-0.5  # larger scores have the rounding of float32 as large errors of weights
    want = attention(q, keys, values, tables, lens, scale)
    with jq.implementation(implementation):
        got = jax.jit(functools.partial(jq.paged_attention, scale=scale))(
            q, k, v, tables, lens, **scales
        )
        k, v, *scales = (
            None if a is None else contiguous(a, tables) for a in (k, v, k_scales, v_scales)
        )
        run = jq.attention(q, k, v, lens, scale=scale, k_scales=scales[0], v_scales=scales[1])
    assert nmse(got, want) <= 1e-12 and nmse(run, want) <= 1e-12


@pytest.mark.grid
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8, jnp.float8_e4m3fn])
def test_options_and_quantized_pages(dtype, options, implementation):
    q, k_pages, v_pages, tables = arrays()
    (k, k_scales, keys), (v, v_scales, values) = (quantized(p, dtype) for p in (k_pages, v_pages))
    lens = np.array([0, 20, 33, 48])
    want = attention(q, keys, values, tables, lens, **options)
    options = options | dict(k_scales=k_scales, v_scales=v_scales)
    choose = jq.implementation(implementation)
    got = choose(jq.paged_attention)(q, k, v, tables, lens, **options)
    assert nmse(got, want) <= 1e-12
    # the same tokens in one run per sequence
    k, v, *scales = (
        None if a is None else contiguous(a, tables) for a in (k, v, k_scales, v_scales)
    )
    options |= dict(zip(("k_scales", "v_scales"), scales, strict=True))
    assert nmse(choose(jq.attention)(q, k, v, lens, **options), want) <= 1e-12


def contiguous(pages, tables):
    """Reshapes (num_pages, heads, page_size, ...) to (batch, heads, capacity, ...)."""
    gathered = jnp.moveaxis(pages[tables], 2, 1)
    return gathered.reshape(*gathered.shape[:2], -1, *gathered.shape[4:])


def test_long_contexts_are_split_by_the_kernels():
    """The splits form a cluster that merges itself."""
    q, k_pages, v_pages, tables = arrays(
        batch=2, num_kv_heads=1, head_dim=32, page_size=64, per_sequence=16
    )
    lens = np.array([0, 900])
    call = jax.jit(jq.implementation("sim")(jq.paged_attention))
    assert call.lower(q, k_pages, v_pages, tables, lens).as_text().count("custom_call @") == 1
    got = call(q, k_pages, v_pages, tables, lens)
    assert not np.any(got[0]) and nmse(got, attention(q, k_pages, v_pages, tables, lens)) <= 1e-12


def test_empty_sequences_give_zeros():
    q, k_pages, v_pages, tables = arrays()
    got = jq.paged_attention(q, k_pages, v_pages, tables, np.array([0, 7, 0, 1]))
    assert not np.any(got[0]) and not np.any(got[2]) and np.any(got[1])


def test_poison_in_unused_slots_does_not_matter():
    q, k_pages, v_pages, tables = arrays()
    lens = np.array([0, 1, 20, 47])
    clean = jq.paged_attention(q, k_pages, v_pages, tables, lens)
    used = np.zeros((k_pages.shape[0], k_pages.shape[2]), bool)
    for b, length in enumerate(lens):
        for t in range(length):
            used[tables[b, t // 16], t % 16] = True
    mask = used[:, None, :, None]
    k_pages, v_pages = (jnp.where(mask, p, jnp.nan) for p in (k_pages, v_pages))
    np.testing.assert_array_equal(jq.paged_attention(q, k_pages, v_pages, tables, lens), clean)


def test_inside_a_program_lengths_are_clamped_and_unknown_pages_left_out():
    q, k_pages, v_pages, tables = arrays()
    tables[1, 1], tables[2] = -1, k_pages.shape[0]
    lens = np.array([2**31 - 1, 40, 48, -3])
    got = jax.jit(jq.paged_attention)(q, k_pages, v_pages, tables, lens)
    assert nmse(got, attention(q, k_pages, v_pages, tables, lens)) <= 1e-12
    assert not np.any(got[2]) and not np.any(got[3])


def test_page_ids_behind_a_sequences_last_page_do_not_matter():
    q, k_pages, v_pages, tables = arrays()
    lens = np.array([16, 32, 33, 0])
    want = attention(q, k_pages, v_pages, tables, lens)
    tables[0, 1:], tables[1, 2], tables[3] = -1, k_pages.shape[0], 2**31 - 1
    assert nmse(jq.paged_attention(q, k_pages, v_pages, tables, lens), want) <= 1e-12


def test_large_scores_do_not_overflow():
    q, k_pages, v_pages, tables = arrays()
    lens = np.array([5, 17, 33, 48])
    got = jq.paged_attention(q * 1e4, k_pages, v_pages, tables, lens)
    assert nmse(got, attention(q * 1e4, k_pages, v_pages, tables, lens)) <= 1e-6


def test_no_sequences():
    q, k_pages, v_pages, _ = arrays()
    got = jq.paged_attention(
        q[:0], k_pages, v_pages, jnp.zeros((0, 3), jnp.int32), jnp.zeros(0, jnp.int32)
    )
    assert got.shape == (0, 4, 64)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            dict(q=jnp.zeros((4, 3, 64))),
            ValueError,
            "num_heads=3 must be a multiple of num_kv_heads=2",
        ),
        (dict(q=jnp.zeros((4, 4, 32))), ValueError, r"q has shape \(4, 4, 32\).*head_dim=64"),
        (dict(q=jnp.zeros((4, 4, 64), jnp.int8)), TypeError, "q has dtype int8"),
        (dict(block_tables=jnp.zeros((3, 3), jnp.int32)), ValueError, "block_tables has shape"),
        (dict(block_tables=jnp.zeros((4, 3))), TypeError, "block_tables has dtype float32"),
        (dict(block_tables=np.full((4, 3), -1)), ValueError, "block_tables holds page -1.*0 to 13"),
        (dict(block_tables=np.full((4, 3), 14)), ValueError, "block_tables holds page 14"),
        (dict(context_lens=np.array([1, 2, 3])), ValueError, "context_lens has shape"),
        (dict(context_lens=np.array([1, 2, 3, 49])), ValueError, "context_lens=.*0 to 48"),
        (dict(context_lens=np.array([1, 2, 3, -1])), ValueError, "context_lens="),
        (
            dict(context_lens=np.array([1, 2, 3, 2**32 + 4])),
            ValueError,
            "context_lens=.*2147483647",
        ),
        (
            dict(block_tables=np.full((4, 3), 2**32)),
            ValueError,
            "block_tables holds page 2147483647",
        ),
        (dict(scale=float("nan")), ValueError, "scale=nan"),
        (dict(scale=10**400), ValueError, "scale=inf must be positive"),
        (dict(scale=0.0), ValueError, "scale=0.0 must be positive"),
        (dict(soft_cap=-1.0), ValueError, "soft_cap=-1.0 must be positive and finite"),
        (
            dict(soft_cap=1e300),
            ValueError,
            r"soft_cap=1e\+300 must be positive and finite in float32",
        ),
        (
            dict(scale=1e-300),
            ValueError,
            "scale=1e-300 must be positive and finite in float32",
        ),
        (dict(scale="x"), TypeError, "scale is of type str; it must be a static number"),
        (dict(window=0), ValueError, "window=0 must be a positive int32"),
        (dict(window=1.5), TypeError, "window is of type float; it must be a static integer"),
        (dict(window="3"), TypeError, "window is of type str; it must be a static integer"),
        (dict(sinks=np.zeros(2, np.float32)), ValueError, r"sinks has shape \(2,\).*\(4,\)"),
        (dict(sinks=np.zeros(4, np.int32)), TypeError, "sinks has dtype int32"),
        (dict(v_scales=jnp.zeros((14, 2, 16))), TypeError, "v_scales belongs to int8 k_pages"),
        (dict(q=jnp.zeros((4, 0, 64))), ValueError, "num_heads=0 must be"),
        (dict(block_tables=jnp.zeros((4, 0), jnp.int32)), ValueError, "block_tables has shape"),
    ],
)
def test_arguments_that_do_not_fit(change, error, message):
    names = ("q", "k_pages", "v_pages", "block_tables")
    good = dict(zip(names, arrays(), strict=True), context_lens=np.array([1, 2, 3, 4]))
    with pytest.raises(error, match=message):
        jq.paged_attention(**(good | change))


def test_page_ids_before_the_window_do_not_matter():
    q, k_pages, v_pages, tables = arrays()
    lens = np.array([48, 40, 17, 1])
    want = attention(q, k_pages, v_pages, tables, lens, window=16)
    tables[0, :2], tables[1, 0] = -1, 1000
    assert nmse(jq.paged_attention(q, k_pages, v_pages, tables, lens, window=16), want) <= 1e-12
    with pytest.raises(ValueError, match="block_tables holds page -1"):
        jq.paged_attention(q, k_pages, v_pages, tables, lens, window=25)


def test_vmap_of_both():
    q, k_pages, v_pages, tables = arrays()
    k, v, lens = contiguous(k_pages, tables), contiguous(v_pages, tables), np.array([5, 48, 0, 33])
    want = attention(q, k_pages, v_pages, tables, lens)
    one = jax.vmap(lambda q, k, v, n: jq.attention(q[None], k[None], v[None], n[None])[0])(
        q, k, v, lens
    )
    assert nmse(one, want) <= 1e-12
    paged = jax.vmap(jq.paged_attention, in_axes=(0, None, None, None, None))
    got = paged(jnp.stack([q, 2 * q]), k_pages, v_pages, tables, lens)
    assert nmse(got, [want, attention(2 * q, k_pages, v_pages, tables, lens)]) <= 1e-12


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            dict(q=jnp.zeros((3, 4, 64))),
            ValueError,
            r"q has shape \(3, 4, 64\); it must be \(batch=4, ",
        ),
        (dict(v=jnp.zeros((4, 2, 47, 64))), ValueError, "v has shape .* the shape of k"),
        (
            dict(k=jnp.zeros((4, 2, 64))),
            ValueError,
            r"k has shape .*\(batch, num_kv_heads, capacity, head_dim\)",
        ),
        (
            dict(k=jnp.zeros((4, 2, 0, 64)), v=jnp.zeros((4, 2, 0, 64))),
            ValueError,
            "only the batch may be empty",
        ),
        (dict(lengths=np.array([1, 2, 49, 0])), ValueError, "lengths=.* must be 0 to capacity=48"),
        (dict(lengths=np.zeros((4, 1), np.int32)), ValueError, "lengths has shape"),
        (dict(k_scales=jnp.zeros((4, 2, 48))), TypeError, "k_scales belongs to int8 k"),
    ],
)
def test_contiguous_arguments_that_do_not_fit(change, error, message):
    q, k_pages, v_pages, tables = arrays()
    good = dict(
        q=q,
        k=contiguous(k_pages, tables),
        v=contiguous(v_pages, tables),
        lengths=np.array([1, 2, 3, 4]),
    )
    with pytest.raises(error, match=message):
        jq.attention(**(good | change))


def test_contiguous_lengths_are_clamped_inside_a_program():
    q, k_pages, v_pages, tables = arrays()
    k, v = contiguous(k_pages, tables), contiguous(v_pages, tables)
    got = jax.jit(jq.attention)(q, k, v, np.array([2**31 - 1, 40, -3, 0]))
    assert nmse(got, attention(q, k_pages, v_pages, tables, np.array([48, 40, 0, 0]))) <= 1e-12
    assert jq.attention(q[:0], k[:0], v[:0], np.zeros(0, np.int32)).shape == (0, 4, 64)
