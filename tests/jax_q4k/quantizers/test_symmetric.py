"""Scale only: the search against a much finer one in float64, and the packed fields."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jax_q4k.quantizers import symmetric


def blocks(x: np.ndarray, w: np.ndarray, top: int) -> list[np.ndarray]:
    function = functools.partial(symmetric.blocks, grid=symmetric.integers(top))
    return [np.asarray(array) for array in jax.jit(function)(x, w)]


def heavy(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(3, shape).astype(np.float32)


def best_error(x: np.ndarray, w: np.ndarray, top: int) -> float:
    """Returns the smallest sum of w * (s * q - x)^2 found, with q in -top to top - 1.

    x, w are float64 (values,).
    """
    best, levels = np.inf, np.linspace(0.5, 1.1, 200) * top
    for s in np.abs(x).max() / np.concatenate([levels, -levels]):
        for _ in range(3):
            q = np.clip(np.rint(x / s), -top, top - 1)
            s = (w * q * x).sum() / (w * q * q).sum()
            best = min(best, (w * (s * q - x) ** 2).sum())
    return best


@pytest.mark.parametrize("top", [8, 16])
def test_blocks_come_near_the_best_fit(top):
    x, w = heavy(32, 20), np.random.default_rng(1).random((32, 20), np.float32) + 0.1
    d, q = blocks(x, w, top)
    assert q.min() >= -top and q.max() <= top - 1 and (q == np.rint(q)).all()
    np.testing.assert_array_equal(d, d.astype(np.float16).astype(np.float32))
    errors = (w * (d * q - x) ** 2).sum(0, dtype=np.float64)
    best = [
        best_error(x[:, i].astype(np.float64), w[:, i].astype(np.float64), top) for i in range(20)
    ]
    assert np.sqrt(errors.sum() / sum(best)) <= 1.01


def test_the_side_of_the_longer_range_is_the_largest_values():
    """The range is -8 to 7: a block's largest magnitude gets -8, whatever its sign."""
    x = np.tile(np.linspace(-0.9, 0.9, 32, dtype=np.float32)[:, None], 2)
    x[0, 0], x[-1, 1] = -8 / 7, 8 / 7
    d, q = blocks(x, np.ones_like(x), 8)
    assert d[0] > 0 > d[1]
    assert q[0, 0] == q[-1, 1] == -8


def test_super_blocks_give_what_the_fields_hold():
    x = heavy(16, 16, 50)
    grid = symmetric.integers(32, minimum=17, fractions=4)
    function = functools.partial(symmetric.super_blocks, grid=grid, maximum=128)
    d, scale, q = map(np.asarray, jax.jit(function)(x, np.ones_like(x)))
    assert q.min() >= -32 and q.max() <= 31 and (q == np.rint(q)).all()
    assert scale.min() >= -128 and scale.max() <= 127 and (scale == np.rint(scale)).all()
    np.testing.assert_array_equal(d, d.astype(np.float16).astype(np.float32))
    # with scales that need not be multiples of one d
    best = sum(
        best_error(x[:, s, b].astype(np.float64), np.ones(16), 32)
        for s in range(16)
        for b in range(2)
    )
    errors = np.sum((d * scale * q - x)[..., :2] ** 2, dtype=np.float64)
    assert np.sqrt(errors / best) <= 1.15
