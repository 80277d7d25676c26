"""Groups of sequences with separate pages: ids count from a group's first page."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import IMPLEMENTATIONS

import jax_q4k as jq

GROUPS, PAGES, HEADS, SIZE, DIM = 2, 3, 2, 16, 32  # PAGES: per group
FIRST = np.array([0, PAGES])


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape, np.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_over_the_groups_pages(implementation: Any) -> None:
    """Ids of other groups' pages, 3 and -1 here, refer to no page."""
    q, pages = normal(4, 4, DIM), normal(GROUPS * PAGES, HEADS, SIZE, DIM)
    own = np.array([[[0, 2], [1, 3]], [[2, 1], [-1, 0]]])
    outside = (own < 0) | (own >= PAGES)
    of_all = np.where(outside, -1, own + FIRST[:, None, None]).reshape(4, 2)
    lengths, w = np.array([20, 32, 17, 30]), jq.quantize(normal(256, 128), "Q8_0")
    attend = jax.jit(jq.paged_attention)
    project = jax.jit(lambda *given: jq.paged_attention_matmul(*given, w, activations="f32"))
    with jq.implementation(implementation):
        for function in (attend, project):
            got, want = (function(q, pages, pages, table, lengths) for table in (own, of_all))
            assert nmse(got, want) <= 1e-12


@pytest.mark.slow("compiles a program for each case", quick=["native", "sim"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_go_to_the_groups_pages(implementation: Any) -> None:
    k, pages = normal(6, HEADS, DIM), normal(GROUPS * PAGES, HEADS, SIZE, DIM)
    own = np.array([[47, 0, 48], [-1, 1, 20]])  # 48: in the next group
    outside = (own < 0) | (own >= PAGES * SIZE)
    of_all = np.where(outside, -1, own + FIRST[:, None] * SIZE).reshape(-1)
    angles = normal(6, DIM // 2)
    append = jax.jit(lambda slots: jq.append_kv(pages, pages, k, k, slots))
    rotate = jax.jit(
        lambda slots: jq.rope_append(
            k, k, k, pages, pages, slots, angles, angles, interleaved=False
        )
    )
    with jq.implementation(implementation):
        for function in (append, rotate):
            for got, want in zip(function(own), function(of_all), strict=True):
                np.testing.assert_array_equal(got, want)


def test_groups_that_do_not_fit() -> None:
    q, k, pages = normal(4, 4, DIM), normal(4, HEADS, DIM), normal(5, HEADS, SIZE, DIM)
    ids, lengths = np.zeros((2, 2), np.int32), np.ones(4, np.int32)
    with pytest.raises(ValueError, match="num_pages=5 must be a multiple of its groups"):
        jq.paged_attention(q, pages, pages, ids[..., None], lengths)
    with pytest.raises(ValueError, match="num_pages=5 must be a multiple of its groups"):
        jq.append_kv(pages, pages, k, k, ids)
    with pytest.raises(ValueError, match="block_tables has shape .* must be .batch=4"):
        jq.paged_attention(q, pages[:4], pages[:4], ids[None], lengths)
    with pytest.raises(ValueError, match="pages in use must be 0 to 1"):
        jq.paged_attention(q, pages[:4], pages[:4], ids[..., None] + 2, lengths)
    with pytest.raises(ValueError, match="slots must be below num_pages"):
        jq.append_kv(pages[:4], pages[:4], k, k, ids + 2 * SIZE)
