import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import nmse

import jax_q4k as jq

rng = np.random.default_rng(3)


def attention(q, k_pages, v_pages, block_tables, context_lens, scale=None):
    """The definition, token by token, in float64."""
    q, k_pages, v_pages = (np.asarray(a).astype(np.float64) for a in (q, k_pages, v_pages))
    batch, num_heads, head_dim = q.shape
    num_pages, num_kv_heads, page_size, _ = k_pages.shape
    out = np.zeros_like(q)
    for b in range(batch):
        length = min(context_lens[b], block_tables.shape[1] * page_size)
        slots = [(block_tables[b, t // page_size], t % page_size) for t in range(length)]
        slots = [(page, offset) for page, offset in slots if 0 <= page < num_pages]
        for h in range(num_heads if slots else 0):
            group = h // (num_heads // num_kv_heads)
            k = np.stack([k_pages[page, group, offset] for page, offset in slots])
            v = np.stack([v_pages[page, group, offset] for page, offset in slots])
            scores = k @ q[b, h] * (head_dim**-0.5 if scale is None else scale)
            weights = np.exp(scores - scores.max())
            out[b, h] = weights @ v / weights.sum()
    return out


def arrays(batch=4, num_heads=4, num_kv_heads=2, head_dim=64, page_size=16, per_sequence=3, dtype=jnp.float32):
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
    got = jq.paged_attention(q[:0], k_pages, v_pages, jnp.zeros((0, 3), jnp.int32), jnp.zeros(0, jnp.int32))
    assert got.shape == (0, 4, 64)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(q=jnp.zeros((4, 3, 64))), ValueError, "num_heads=3 must be a multiple of num_kv_heads=2"),
        (dict(q=jnp.zeros((4, 4, 32))), ValueError, r"q has shape \(4, 4, 32\).*head_dim=64"),
        (dict(q=jnp.zeros((4, 4, 64), jnp.bfloat16)), TypeError, "q has dtype bfloat16"),
        (dict(block_tables=jnp.zeros((3, 3), jnp.int32)), ValueError, "block_tables has shape"),
        (dict(block_tables=jnp.zeros((4, 3))), TypeError, "block_tables has dtype float32"),
        (dict(block_tables=np.full((4, 3), -1)), ValueError, "block_tables holds page -1.*0 to 13"),
        (dict(block_tables=np.full((4, 3), 14)), ValueError, "block_tables holds page 14"),
        (dict(context_lens=np.array([1, 2, 3])), ValueError, "context_lens has shape"),
        (dict(context_lens=np.array([1, 2, 3, 49])), ValueError, "context_lens=.*0 to 48"),
        (dict(context_lens=np.array([1, 2, 3, -1])), ValueError, "context_lens="),
        (dict(context_lens=np.array([1, 2, 3, 2**32 + 4])), ValueError, "context_lens=.*2147483647"),
        (dict(block_tables=np.full((4, 3), 2**32)), ValueError, "block_tables holds page 2147483647"),
        (dict(scale=float("nan")), ValueError, "scale=nan"),
        (dict(scale=0.0), ValueError, "scale=0.0 must be positive"),
        (dict(q=jnp.zeros((4, 0, 64))), ValueError, "num_heads=0 must be"),
        (dict(block_tables=jnp.zeros((4, 0), jnp.int32)), ValueError, "block_tables has shape"),
    ],
)
def test_arguments_that_do_not_fit(change, error, message):
    names = ("q", "k_pages", "v_pages", "block_tables")
    good = dict(zip(names, arrays(), strict=True), context_lens=np.array([1, 2, 3, 4]))
    with pytest.raises(error, match=message):
        jq.paged_attention(**(good | change))
