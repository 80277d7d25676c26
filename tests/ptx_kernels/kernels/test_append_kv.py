"""Appending keys and values, simulated, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import int8_vectors, stored

from ptx_kernels import simulator
from ptx_kernels.kernels.append_kv import append_kv
from ptx_kernels.ptx import KernelError


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "fp8"])
@pytest.mark.parametrize("tokens, heads, head_dim", [(1, 1, 32), (5, 3, 80), (2, 2, 256)])
def test_equals_numpy(tokens: int, heads: int, head_dim: int, dtype: str) -> None:
    rng = np.random.default_rng(tokens)
    shape = (4, heads, 16, head_dim)
    pages = [stored(rng.standard_normal(shape, np.float32), dtype) for _ in range(2)]
    new = [rng.standard_normal((tokens, heads, head_dim), np.float32) for _ in range(2)]
    slots = rng.permutation(64)[:tokens].astype(np.int32)
    kernel = append_kv(
        tokens=tokens, num_pages=4, num_kv_heads=heads, page_size=16, head_dim=head_dim, dtype=dtype
    )
    results = simulator.run(kernel, *pages, *new, slots)
    for result, before, values in zip(results, pages, new, strict=True):
        want = before.copy()
        for slot, value in zip(slots, values, strict=True):
            want[slot // 16, :, slot % 16] = stored(value, dtype)
        np.testing.assert_array_equal(result, want)


def test_slots_outside_the_pages_are_skipped() -> None:
    pages = np.zeros((2, 1, 32, 32), np.float32)
    new = np.ones((5, 1, 32), np.float32)
    slots = np.array([-1, 64, 63, 2**31 - 1, -(2**31)], np.int32)
    kernel = append_kv(tokens=5, num_pages=2, num_kv_heads=1, page_size=32, head_dim=32)
    k_pages, v_pages = simulator.run(kernel, pages, pages, new, new, slots)
    want = pages.copy()
    want[1, 0, 31] = 1
    np.testing.assert_array_equal(k_pages, want)
    np.testing.assert_array_equal(v_pages, want)


@pytest.mark.parametrize("heads, head_dim", [(1, 32), (3, 112), (2, 256)])
def test_int8_pages_get_a_scale_per_token_and_head(heads: int, head_dim: int) -> None:
    rng = np.random.default_rng(heads)
    pages, scales = (
        np.full((2, 2, heads, 16, head_dim), 99, np.int8),
        np.full((2, 2, heads, 16), 99, np.float32),
    )
    new = (
        rng.standard_normal((2, 5, heads, head_dim), np.float32)
        * np.float32([1, 1e3, 0, 1e-39, 1])[:, None, None]
    )
    new[0, 4, 0, 7] = np.nan
    new[1, 4, 0, 5] = np.inf
    slots = np.array([17, 3, 20, 31, 0], np.int32)
    kernel = append_kv(
        tokens=5, num_pages=2, num_kv_heads=heads, page_size=16, head_dim=head_dim, dtype="int8"
    )
    results = simulator.run(kernel, *pages, *scales, *new, slots)
    for i in range(2):
        quants, steps = int8_vectors(new[i])
        want, want_scales = pages[i].copy(), scales[i].copy()
        for t, slot in enumerate(slots):
            want[slot // 16, :, slot % 16], want_scales[slot // 16, :, slot % 16] = (
                quants[t],
                steps[t],
            )
        np.testing.assert_array_equal(results[i], want)
        np.testing.assert_array_equal(results[2 + i], want_scales)
    assert np.isnan(results[2][0, 0, 0]) and np.isinf(results[3][0, 0, 0])


@pytest.mark.parametrize("head_dim, dtype", [(40, "f32"), (272, "f32"), (64, "f64")])
def test_what_it_refuses(head_dim: int, dtype: str) -> None:
    with pytest.raises(KernelError, match=f"(head_dim={head_dim}|dtype='{dtype}') must be one of"):
        append_kv(
            tokens=1, num_pages=1, num_kv_heads=1, page_size=16, head_dim=head_dim, dtype=dtype
        )
