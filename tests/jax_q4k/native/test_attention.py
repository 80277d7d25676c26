"""Attention and caches with the CPU kernels, for every available instruction set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import oracles
from support.helpers import nmse

import jax_q4k as jq
from jax_q4k.ops import causal_attention

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn]
PAGE_SIZE = 16


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def cache(dtype, num_pages, kv_heads, head_dim):
    """Pages of random tokens, and the keyword arguments other than k_pages and v_pages."""
    tokens = num_pages * PAGE_SIZE
    pages = [jnp.zeros((num_pages, kv_heads, PAGE_SIZE, head_dim), dtype)] * 2
    scales = (
        [jnp.zeros((num_pages, kv_heads, PAGE_SIZE))] * 2 if dtype == jnp.int8 else [None, None]
    )
    k, v = normal(tokens, kv_heads, head_dim, seed=1), normal(tokens, kv_heads, head_dim, seed=2)
    names = dict(zip(("k_scales", "v_scales"), scales, strict=True))
    filled = jq.implementation("xla")(jq.append_kv)(*pages, k, v, np.arange(tokens), **names)
    return filled[:2], dict(zip(("k_scales", "v_scales"), filled[2:], strict=False))


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 700},
        {"soft_cap": 2.0},
        {"sinks": np.array([0.5, -1.0, 200.0, -np.inf], np.float32)},
    ],
    ids=str,
)
def test_contexts_of_several_parts(kernels, options):
    """Parts have up to 256 tokens; the contexts have zero, two, three and six parts."""
    lens, per_sequence = np.array([0, 512, 513, 1300], np.int32), 82
    (k, v), _ = cache(jnp.float32, 4 * per_sequence, 2, 32)
    tables = (
        np.random.default_rng(0)
        .permutation(4 * per_sequence)
        .reshape(4, per_sequence)
        .astype(np.int32)
    )
    q = normal(4, 4, 32)
    got = jq.implementation("native")(jq.paged_attention)(q, k, v, tables, lens, **options)
    want = oracles.attention(q, np.asarray(k), np.asarray(v), tables, lens, 32**-0.5, **options)
    assert nmse(got, want) <= 1e-11


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_of_every_type(kernels, dtype):
    (k, v), scales = cache(dtype, 6, 2, 48)
    tables, lens = np.array([[5, 0, 3], [1, 4, 2]], np.int32), np.array([17, 48], np.int32)
    q = normal(2, 6, 48)
    got, want = (
        jq.implementation(name)(jq.paged_attention)(q, k, v, tables, lens, **scales)
        for name in ("native", "xla")
    )
    assert nmse(got, want) <= 1e-11


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [2, 16])  # few queries, and more than read pages in place
def test_heads_of_512_dimensions(kernels, heads, dtype):
    (k, v), scales = cache(dtype, 6, 1, 512)
    arrays = k, v, np.array([[5, 0, 3], [1, 4, 2]], np.int32), np.array([17, 48], np.int32)
    held = [np.asarray(x.astype(jnp.float32)) for x in (k, v)]
    if scales:
        held = [x * np.asarray(s)[..., None] for x, s in zip(held, scales.values(), strict=True)]
    q = normal(2, heads, 512)
    got = jq.implementation("native")(jq.paged_attention)(q, *arrays, **scales)
    assert nmse(got, oracles.attention(q, *held, *arrays[2:], 512**-0.5)) <= 1e-11


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, value_dim",
    [(16, 1, 576, 512), (2, 1, 576, 576), (20, 1, 288, 256), (6, 2, 64, 32)],
)
def test_latent_pages(kernels, heads, kv_heads, head_dim, value_dim, dtype):
    """A context of one part, and one of two."""
    k = normal(24 * PAGE_SIZE, kv_heads, head_dim, seed=1)
    pages = jnp.zeros((24, kv_heads, PAGE_SIZE, head_dim), dtype)
    scales = {"k_scales": jnp.zeros(pages.shape[:3])} if dtype == jnp.int8 else {}
    append = jq.implementation("xla")(jq.append_kv)
    pages, *steps = append(pages, None, k, None, np.arange(len(k)), **scales)
    scales = dict(zip(scales, steps, strict=True))
    held = np.asarray(pages.astype(jnp.float32))
    if scales:
        held = held * np.asarray(scales["k_scales"])[..., None]
    tables = np.random.default_rng(0).permutation(24)[:19].astype(np.int32)
    tables, lens = np.stack([tables, tables[::-1]]), np.array([300, 21], np.int32)
    q, options = normal(2, heads, head_dim), {"scale": 0.07, "window": 290}
    got = jq.implementation("native")(jq.paged_attention)(
        q, pages, None, tables, lens, value_dim=value_dim, **scales, **options
    )
    want = oracles.attention(q, held, held[..., :value_dim], tables, lens, **options)
    assert nmse(got, want) <= 1e-11


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 70}, {"soft_cap": 2.0, "sinks": np.float32([0.5, -1, 2, -np.inf, 0, 3])}],
    ids=str,
)
def test_pieces(kernels, options, latent, dtype):
    """Pieces of several lengths; a token's bits are those of a decode step.

    One sequence crosses the end of a part, and its piece the end of a block of tokens; pieces of
    up to two tokens read keys in place.
    """
    lens, lengths, time = np.array([330, 40, 259], np.int32), np.array([45, 0, 2], np.int32), 45
    (k, v), scales = cache(dtype, 64, 2, 64)
    if latent:
        v, options = None, options | {"value_dim": 32}
        scales.pop("v_scales", None)
    tables = np.random.default_rng(0).permutation(63).reshape(3, 21).astype(np.int32)
    q = normal(3, time, 6, 64)
    given, options = (k, v, tables, lens), options | scales
    got, want = (
        np.asarray(
            jq.implementation(name)(jq.paged_attention)(q, *given, lengths=lengths, **options)
        )
        for name in ("native", "xla")
    )
    assert nmse(got, want) <= 1e-11
    assert not got[1].any() and not got[2, 2:].any()
    for count in (1, 2):  # the last tokens alone
        alone = jq.implementation("native")(jq.paged_attention)(
            q[:, 45 - count : 45], *given, lengths=np.minimum(lengths, count), **options
        )
        np.testing.assert_array_equal(alone[0], got[0, 45 - count :])
    steps = np.arange(45)
    with jq.implementation("native"):
        decoded = jq.paged_attention(
            q[0], k, v, np.repeat(tables[:1], 45, axis=0), steps + 286, **options
        )
    np.testing.assert_array_equal(decoded, got[0])


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_rows_are_stored_as_keys_are(kernels, dtype):
    """Bits equal those of keys, whatever follows; the last of several tokens for a slot wins."""
    (pages, _), scales = cache(dtype, 3, 2, 96)
    k, slots = normal(5, 2, 96, seed=3) * 100, np.array([17, -1, 47, 3, 17], np.int32)
    both = jq.implementation("native")(jq.append_kv)(pages, pages, k, k, slots, **scales)
    scales.pop("v_scales", None)
    got = jq.implementation("native")(jq.append_kv)(pages, None, k, None, slots, **scales)
    for one, other in zip(got, both[::2], strict=True):
        np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))


def test_page_ids_outside_the_pages_are_not_read(kernels):
    (k, v), _ = cache(jnp.float32, 4, 2, 32)
    tables = np.array([[0, -1, 3], [4, 2, 2**31 - 1], [-(2**31), 7, 9]], np.int32)
    arrays = normal(3, 4, 32), k, v, tables, np.array([48, 40, 33], np.int32)
    got, want = (  # outside of a program such ids are refused
        np.asarray(jax.jit(jq.implementation(name)(jq.paged_attention))(*arrays))
        for name in ("native", "xla")
    )
    assert nmse(got, want) <= 1e-12 and not got[2].any()


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_values_are_stored_rounded_to_even(kernels, dtype):
    """Values with 8 bits of mantissa over many powers of two, ties, the maximum, and NaN.

    They include all ties of f16 and fp8.
    """
    mantissas = 1 + np.arange(512) / 512
    powers = 2.0 ** np.array(
        [-26, -25, -24, -20, -15, -14, -10, -9, -8, -7, -6, -1, 0, 5, 8, 15], np.float64
    )
    ties = [
        2049,
        2051,
        65519,
        65520,
        1e9,
        448,
        464,
        480,
        np.inf,
        np.nan,
        0,
        1 + 2.0**-8,
        1 + 3 * 2.0**-8,
    ]
    values = np.concatenate([np.outer(powers, mantissas).ravel(), ties, np.zeros(19)]).astype(
        np.float32
    )
    values = np.concatenate([values, -values]).reshape(-1, 1, 32)
    values = np.concatenate([values, np.zeros((-len(values) % PAGE_SIZE, 1, 32), np.float32)])
    pages = [jnp.zeros((len(values) // PAGE_SIZE, 1, PAGE_SIZE, 32), dtype)] * 2
    arrays = *pages, values, values, np.arange(len(values), dtype=np.int32)
    for got, want in zip(
        *(jq.implementation(name)(jq.append_kv)(*arrays) for name in ("native", "xla")), strict=True
    ):
        np.testing.assert_array_equal(
            np.asarray(got.astype(jnp.float32)), np.asarray(want.astype(jnp.float32))
        )


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_contiguous_cache_of_any_length(kernels, dtype):
    """The last 16-token block may be partial, and so may its scales."""
    shape = 2, 2, 21, 32
    k, v = normal(*shape), normal(*shape, seed=1)
    scales = {}
    if dtype == jnp.int8:
        scales = {"k_scales": normal(*shape[:3], seed=2), "v_scales": normal(*shape[:3], seed=3)}
        k, v = k * 40, v * 40
    arrays = normal(2, 4, 32), jnp.asarray(k, dtype), jnp.asarray(v, dtype), np.array([21, 5])
    got, want = (
        jq.implementation(name)(jq.attention)(*arrays, **scales) for name in ("native", "xla")
    )
    assert nmse(got, want) <= 1e-11


def test_scores_of_nothing_but_infinities_are_nan(kernels):
    """Scores that are all -inf give NaN, not the zeros of an empty context.

    With a sink, which is finite, the tokens have no weight.
    """
    (k, v), _ = cache(jnp.float32, 2, 1, 32)
    k, tables, lens = jnp.abs(k) + 1, np.array([[0], [1]], np.int32), np.array([3, 0], np.int32)
    q = jnp.full((2, 1, 32), -np.inf)
    for sinks, first in ((None, np.nan), (np.zeros(1, np.float32), 0)):
        for name in ("native", "xla"):
            out = np.asarray(
                jq.implementation(name)(jq.paged_attention)(q, k, v, tables, lens, sinks=sinks)
            )
            np.testing.assert_array_equal(out[0], np.full((1, 32), first), err_msg=name)
            assert not out[1].any()


def test_the_last_of_several_tokens_for_a_slot_stays(kernels):
    """The token is complete: no thread writes part of another token there."""
    tokens = np.broadcast_to(np.arange(1, 601, dtype=np.float32)[:, None, None], (600, 4, 128))
    slots = np.where(np.arange(600) % 2, 0, 17).astype(np.int32)
    pages = [jnp.zeros((2, 4, PAGE_SIZE, 128))] * 2
    for page in jq.implementation("native")(jq.append_kv)(*pages, tokens, tokens, slots):
        page = np.asarray(page)
        assert (
            (page[0, :, 0] == 600).all()
            and (page[1, :, 1] == 599).all()
            and np.count_nonzero(page) == 2 * 4 * 128
        )


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim, half", [(32, 12), (512, 256), (512, 64)])
def test_rope_append(kernels, dim, half, dtype, interleaved):
    (k_pages, v_pages), scales = cache(dtype, 3, 2, dim)
    q, k, v = normal(5, 4, dim), normal(5, 2, dim, seed=3) * 100, normal(5, 2, dim, seed=4) * 1e-3
    angles = np.random.default_rng(0).uniform(0, 6, (5, half)).astype(np.float32)
    arrays = (
        q,
        k,
        v,
        k_pages,
        v_pages,
        np.array([3, -1, 40, 16, 47], np.int32),
        np.cos(angles),
        np.sin(angles),
    )
    norms = (
        dict(q_norm=normal(dim, seed=5), k_norm=normal(dim, seed=6), eps=1e-5)
        if interleaved
        else {}
    )
    for got, want in zip(
        *(
            jq.implementation(name)(jq.rope_append)(
                *arrays, interleaved=interleaved, return_keys=True, **norms, **scales
            )
            for name in ("native", "xla")
        ),
        strict=True,
    ):
        got, want = (np.asarray(x.astype(jnp.float32)) for x in (got, want))
        # one value may round the other way
        assert nmse(got, want) <= (1e-12 if dtype == jnp.float32 else 1e-6)


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("window, capped", [(None, False), (1, False), (9, True), (30, False)])
@pytest.mark.parametrize("time", [1, 16, 37])
def test_causal_attention(kernels, time, window, capped):
    """Three queries per key; fewer than four neighboring tokens see the same keys."""
    q, k, v = normal(2, time, 6, 48), normal(2, time, 2, 48, seed=1), normal(2, time, 2, 48, seed=2)
    lengths = np.array([time, max(1, time - 5)], np.int32)
    k[1, lengths[1] :] = v[1, lengths[1] :] = np.nan
    sinks = jnp.array([0.5, -1.0, 3.0, -np.inf, 0.0, 1.0]) if capped else None
    options = {"scale": 0.2, "window": window, "soft_cap": 0.7 if capped else None}
    got = np.asarray(
        jax.jit(
            lambda *a: jq.implementation("native")(jq.causal_attention)(*a, sinks=sinks, **options)
        )(q, k, v, lengths)
    )
    given = *map(jnp.asarray, (q, k, v, lengths)), sinks
    want = causal_attention.reference(*given, **options)
    for row, length in enumerate(lengths):
        assert nmse(got[row, :length], np.asarray(want)[row, :length]) <= 1e-12


@pytest.mark.grid(apart=["kernels"])
@pytest.mark.parametrize("head_dim, value_dim", [(192, 128), (512, 512), (32, 576)])
def test_causal_attention_with_values_of_another_width(kernels, head_dim, value_dim):
    q, k = normal(2, 37, 4, head_dim), normal(2, 37, 4, head_dim, seed=1)
    given = *map(jnp.asarray, (q, k, normal(2, 37, 4, value_dim, seed=2))), jnp.array([37, 30])
    got = np.asarray(jq.implementation("native")(jq.causal_attention)(*given, window=20))
    options = {"scale": head_dim**-0.5, "window": 20, "soft_cap": None}
    want = np.asarray(causal_attention.reference(*given, None, **options))
    for row, length in enumerate((37, 30)):
        assert nmse(got[row, :length], want[row, :length]) <= 1e-12


def test_a_bad_key_spoils_what_sees_it_alone(kernels):
    q, k, v = normal(1, 20, 2, 32), normal(1, 20, 2, 32, seed=1), normal(1, 20, 2, 32, seed=2)
    k[0, 7, 1] = np.nan
    got = np.asarray(jq.implementation("native")(jq.causal_attention)(q, k, v, np.array([20])))[0]
    assert (
        np.isfinite(got[:7]).all() and np.isfinite(got[:, 0]).all() and np.isnan(got[7:, 1]).all()
    )


@pytest.mark.parametrize("heads", [1, 12])  # few queries, and more than read pages in place
def test_every_value_of_float8(heads, kernels):
    codes = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.float8_e4m3fn)
    v = jnp.broadcast_to(codes, (1, 1, PAGE_SIZE, 256))
    q, table, one = np.zeros((1, heads, 256), np.float32), np.zeros((1, 1), np.int32), np.array([1])
    got = jq.implementation("native")(jq.paged_attention)(q, jnp.zeros_like(v), v, table, one)
    want = np.asarray(codes, np.float32)  # includes NaN
    np.testing.assert_array_equal(got[0], np.broadcast_to(want, (heads, 256)))


def test_a_bad_value_spoils_the_windows_that_hold_it(kernels):
    q, k, v = normal(1, 40, 2, 32), normal(1, 40, 2, 32, seed=1), normal(1, 40, 2, 32, seed=2)
    v[0, 5, 1] = np.inf
    with jq.implementation("native"):
        got = np.asarray(jq.causal_attention(q, k, v, np.array([40]), window=4))[0, :, 1]
    finite = np.isfinite(got).all(axis=-1)
    assert finite[:5].all() and finite[9:].all() and not finite[5:9].any()
