"""Appending keys and values, simulated, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import stored

from ptx_kernels import simulator
from ptx_kernels.kernels.append_kv import append_kv


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("tokens, heads, head_dim", [(1, 1, 32), (5, 3, 96), (2, 2, 256)])
def test_equals_numpy(tokens: int, heads: int, head_dim: int, dtype: str) -> None:
    rng = np.random.default_rng(tokens)
    shape = (4, heads, 16, head_dim)
    pages = [stored(rng.standard_normal(shape, np.float32), dtype) for _ in range(2)]
    new = [rng.standard_normal((tokens, heads, head_dim), np.float32) for _ in range(2)]
    slots = rng.permutation(64)[:tokens].astype(np.int32)
    kernel = append_kv(tokens=tokens, num_pages=4, num_kv_heads=heads, page_size=16, head_dim=head_dim, dtype=dtype)
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
