"""Paged decode attention, simulated, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import nmse
from oracles import attention, loaded, stored

from ptx_kernels import simulator
from ptx_kernels.kernels.paged_attention import HEAD_DIMS, PagedAttentionConfig, paged_attention
from ptx_kernels.ptx import KernelError

TOLERANCE = {"f32": 1e-11, "f16": 1e-11, "bf16": 1e-11}  # the oracle gets the same rounded pages
DEFAULT = PagedAttentionConfig()


def run(
    lengths: list[int],
    *,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: str = "f32",
    config: PagedAttentionConfig = DEFAULT,
    poison: bool = True,
    tables: np.ndarray | None = None,
    num_pages: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(simulated, wanted); what no sequence's context covers is NaN unless `poison` is off."""
    rng = np.random.default_rng(len(lengths) + head_dim)
    batch, heads = len(lengths), kv_heads * group
    width = max(1, *(-(-length // page_size) for length in lengths))
    num_pages = num_pages or batch * width + 1
    if tables is None:
        tables = rng.permutation(num_pages)[: batch * width].reshape(batch, width)
    tables = tables.astype(np.int32)
    pages = [rng.standard_normal((num_pages, kv_heads, page_size, head_dim), np.float32) for _ in range(2)]
    if poison:
        used = np.zeros((num_pages, page_size), bool)
        for table, length in zip(tables, lengths, strict=True):
            for t in range(min(max(length, 0), width * page_size)):
                if 0 <= table[t // page_size] < num_pages:
                    used[table[t // page_size], t % page_size] = True
        for p in pages:
            p[np.broadcast_to(~used[:, None, :, None], p.shape)] = np.nan
    pages = [stored(p, dtype) for p in pages]
    q = rng.standard_normal((batch, heads, head_dim), np.float32) * 2
    lens = np.array(lengths, np.int32)
    scale = head_dim**-0.5
    kernel = paged_attention(
        batch=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_pages=num_pages,
        page_size=page_size,
        pages_per_sequence=tables.shape[1],
        scale=scale,
        dtype=dtype,
        config=config,
    )
    (got,) = simulator.run(kernel, q, *pages, tables, lens)
    return got, attention(q, *(loaded(p, dtype) for p in pages), tables, lens, scale)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim: int, dtype: str) -> None:
    got, want = run([21, 3], head_dim=head_dim, dtype=dtype)
    assert nmse(got, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("group, queries", [(1, 8), (3, 8), (4, 4), (7, 8), (8, 8), (9, 8), (5, 2)])
def test_query_heads_per_kv_head(group: int, queries: int) -> None:
    got, want = run([18], group=group, config=PagedAttentionConfig(queries=queries, warps=2))
    assert nmse(got, want) <= 1e-11


@pytest.mark.parametrize("warps, unroll", [(1, 1), (2, 3), (4, 2), (8, 1)])
def test_lengths(warps: int, unroll: int) -> None:
    lengths = [0, 1, 15, 16, 17, 63, 113, 129]
    got, want = run(lengths, kv_heads=1, head_dim=32, config=PagedAttentionConfig(warps=warps, unroll=unroll))
    assert (got[0] == 0).all()
    assert nmse(got, want) <= 1e-11


def test_long_context() -> None:
    got, want = run([1023, 700], kv_heads=1, head_dim=64, page_size=64)
    assert nmse(got, want) <= 1e-11


def test_sequences_may_share_pages() -> None:
    tables = np.array([[3, 1, 0], [3, 1, 2]])
    got, want = run([40, 48], tables=tables, num_pages=4)
    assert nmse(got, want) <= 1e-11


def test_lengths_and_pages_out_of_range() -> None:
    """A negative length is empty, one beyond the table ends with it, tokens in pages that do not exist are left out."""
    tables = np.array([[0, 1], [2, 3], [-1, 1], [5, 2**31 - 1], [0, -(2**31)], [1, 4]])
    got, want = run([-5, 1000, 20, 20, 20, 20], tables=tables, num_pages=4, poison=False)
    assert (got[[0, 3]] == 0).all()
    assert nmse(got, want) <= 1e-11


def test_large_scores_do_not_overflow() -> None:
    q = np.full((1, 1, 32), 300.0, np.float32)
    pages = np.full((1, 1, 16, 32), 300.0, np.float32)
    kernel = paged_attention(
        batch=1, num_heads=1, num_kv_heads=1, head_dim=32, num_pages=1, page_size=16, pages_per_sequence=1, scale=1.0
    )
    for sign in (1, -1):
        (got,) = simulator.run(kernel, q * sign, pages, pages, np.zeros((1, 1), np.int32), np.array([16], np.int32))
        np.testing.assert_allclose(got, 300.0, rtol=1e-5)


def test_nan_query_stays_in_its_head() -> None:
    kernel = paged_attention(
        batch=1, num_heads=2, num_kv_heads=1, head_dim=32, num_pages=1, page_size=16, pages_per_sequence=1, scale=1.0
    )
    q = np.ones((1, 2, 32), np.float32)
    q[0, 1, 5] = np.nan
    pages = np.ones((1, 1, 16, 32), np.float32)
    (got,) = simulator.run(kernel, q, pages, pages, np.zeros((1, 1), np.int32), np.array([3], np.int32))
    assert np.isnan(got[0, 1]).all() and (got[0, 0] == 1).all()


@pytest.mark.parametrize("head_dim, heads", [(48, 2), (0, 2), (288, 2), (64, 3)])
def test_what_it_refuses(head_dim: int, heads: int) -> None:
    with pytest.raises(KernelError, match=f"head_dim={head_dim} must be one of .*multiple of num_kv_heads"):
        paged_attention(
            batch=1,
            num_heads=heads,
            num_kv_heads=2,
            head_dim=head_dim,
            num_pages=1,
            page_size=16,
            pages_per_sequence=1,
            scale=1.0,
        )
