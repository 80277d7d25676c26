"""Appending keys and values in the simulator, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from support.oracles import int8_vectors, stored

from ptx_kernels import simulator
from ptx_kernels.kernels.append_kv import append_kv
from ptx_kernels.ptx import KernelError


@pytest.mark.grid
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "fp8"])
@pytest.mark.parametrize(
    "tokens, heads, head_dim, latent",
    [
        (1, 1, 32, False),
        (5, 3, 80, False),
        (2, 2, 256, False),
        (3, 2, 512, False),
        (3, 1, 576, True),
        (2, 2, 96, True),
    ],
)
def test_equals_numpy(tokens: int, heads: int, head_dim: int, latent: bool, dtype: str) -> None:
    rng, kinds = np.random.default_rng(tokens), 1 if latent else 2
    shape = (4, heads, 16, head_dim)
    pages = [stored(rng.standard_normal(shape, np.float32), dtype) for _ in range(kinds)]
    new = [rng.standard_normal((tokens, heads, head_dim), np.float32) for _ in range(kinds)]
    slots = rng.permutation(64)[:tokens].astype(np.int32)
    sizes = dict(tokens=tokens, num_pages=4, num_kv_heads=heads, page_size=16, head_dim=head_dim)
    kernel = append_kv(**sizes, dtype=dtype, latent=latent)
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


@pytest.mark.parametrize(
    "heads, head_dim, latent",
    [(1, 32, False), (3, 112, False), (2, 256, False), (1, 512, False), (1, 576, True)],
)
def test_int8_pages_get_a_scale_per_token_and_head(heads: int, head_dim: int, latent: bool) -> None:
    rng, kinds = np.random.default_rng(heads), 1 if latent else 2
    pages, scales = (
        np.full((kinds, 2, heads, 16, head_dim), 99, np.int8),
        np.full((kinds, 2, heads, 16), 99, np.float32),
    )
    new = (
        rng.standard_normal((kinds, 5, heads, head_dim), np.float32)
        * np.float32([1, 1e3, 0, 1e-39, 1])[:, None, None]
    )
    new[0, 4, 0, 7] = np.nan
    new[-1, 3, 0, 5] = np.inf
    slots = np.array([17, 3, 20, 31, 0], np.int32)
    sizes = dict(tokens=5, num_pages=2, num_kv_heads=heads, page_size=16, head_dim=head_dim)
    kernel = append_kv(**sizes, dtype="int8", latent=latent)
    results = simulator.run(kernel, *pages, *scales, *new, slots)
    for i in range(kinds):
        quants, steps = int8_vectors(new[i])
        want, want_scales = pages[i].copy(), scales[i].copy()
        for t, slot in enumerate(slots):
            want[slot // 16, :, slot % 16], want_scales[slot // 16, :, slot % 16] = (
                quants[t],
                steps[t],
            )
        np.testing.assert_array_equal(results[i], want)
        np.testing.assert_array_equal(results[kinds + i], want_scales)
    assert np.isnan(results[kinds][0, 0, 0]) and np.isinf(results[-1][1, 0, 15])


@pytest.mark.parametrize(
    "head_dim, dtype, latent, message",
    [
        (40, "f32", False, "head_dim=40 must be one of"),
        (528, "f32", False, "head_dim=528 must be one of"),
        (64, "f64", False, "dtype='f64' must be one of"),
        (48, "f32", True, "head_dim=48 of latent pages must be one of"),
        (608, "f32", True, "head_dim=608 of latent pages must be one of"),
    ],
)
def test_bad_arguments_are_refused(head_dim: int, dtype: str, latent: bool, message: str) -> None:
    sizes = dict(tokens=1, num_pages=1, num_kv_heads=1, page_size=16, head_dim=head_dim)
    with pytest.raises(KernelError, match=message):
        append_kv(**sizes, dtype=dtype, latent=latent)
