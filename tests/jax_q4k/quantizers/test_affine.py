"""Scale and minimum: sub-blocks against a finer float64 search, and properties of super-blocks."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from support.helpers import nmse

from jax_q4k.quantizers import affine

sub_blocks = jax.jit(affine.sub_blocks, static_argnums=2)
super_blocks = jax.jit(functools.partial(affine.super_blocks, top=15))

KINDS = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy": lambda rng, shape: rng.standard_t(3, shape),
    "positive": lambda rng, shape: rng.random(shape) + 0.5,
    "negative": lambda rng, shape: -rng.random(shape) - 0.5,
}


def draw(kind: str, *shape: int, seed: int = 0) -> np.ndarray:
    return KINDS[kind](np.random.default_rng(seed), shape).astype(np.float32)


def best_error(x: np.ndarray, w: np.ndarray, top: int) -> float:
    """Returns the smallest sum of w * (s * q - m - x)^2 found, with q in 0 to `top` and m >= 0.

    x, w are float64 (values,).
    """
    best, low = np.inf, min(x.min(), 0)
    for levels in np.linspace(0.5, 1.1, 200) * top:
        s, m = (x.max() - low) / levels, -low
        for _ in range(4):
            q = np.clip(np.rint((x + m) / s), 0, top)
            mean_q, mean_x = np.average(q, weights=w), np.average(x, weights=w)
            s = (w * (q - mean_q) * x).sum() / (w * (q - mean_q) ** 2).sum()
            m = s * mean_q - mean_x
            if m < 0:
                s, m = (w * q * x).sum() / (w * q * q).sum(), 0.0
            best = min(best, (w * (s * q - m - x) ** 2).sum())
    return best


@pytest.mark.slow("searches the best codes of many blocks", quick=["heavy-top=15"])
@pytest.mark.parametrize("top", [15, 31])
@pytest.mark.parametrize("kind", KINDS)
def test_sub_blocks_come_near_the_best_fit(kind, top):
    x, w = (a.astype(np.float64) for a in (draw(kind, 32, 24), draw("positive", 32, 24, seed=1)))
    s, m = sub_blocks(x.astype(np.float32), w.astype(np.float32), top)
    s, m = np.asarray(s, np.float64), np.asarray(m, np.float64)
    errors = (w * (s * np.clip(np.rint((x + m) / s), 0, top) - m - x) ** 2).sum(0)
    best = [best_error(x[:, i], w[:, i], top) for i in range(x.shape[1])]
    assert (m >= 0).all()
    assert np.sqrt(errors.sum() / sum(best)) <= 1.03


def test_a_sub_block_on_a_grid_is_fitted_exactly():
    rng = np.random.default_rng(0)
    s, m = rng.uniform(0.5, 1.5, 64).astype(np.float32), rng.uniform(2, 4, 64).astype(np.float32)
    q = rng.integers(0, 16, (32, 64))
    q[0], q[1] = 0, 15
    got_s, got_m = sub_blocks((s * q - m).astype(np.float32), np.ones((32, 64), np.float32), 15)
    np.testing.assert_allclose(got_s, s, rtol=1e-5)
    np.testing.assert_allclose(got_m, m, rtol=1e-5)


@pytest.mark.slow("searches the best codes of many blocks")
def test_super_blocks_give_what_the_fields_hold():
    x = draw("heavy", 32, 8, 100)
    d, dmin, scale, minimum, q = map(np.asarray, super_blocks(x, np.ones_like(x)))
    for values, bound in ((scale, 63), (minimum, 63), (q, 15)):
        assert values.min() >= 0 and values.max() <= bound and (values == np.rint(values)).all()
    for f in (d, dmin):
        np.testing.assert_array_equal(f, f.astype(np.float16).astype(np.float32))
    assert nmse(d * scale * q - dmin * minimum, x) <= 0.12**2


def test_super_blocks_are_better_than_their_sub_blocks_rounded():
    """A joint search beats rounding each sub-block's s and m to 63 steps of the largest."""
    x = draw("heavy", 32, 8, 100)

    def error(s, m):
        q = np.clip(np.rint((x + m) / np.where(s > 0, s, 1)), 0, 15)
        return nmse(s * q - m, x)

    def nearest_part(v):
        d = np.asarray(v).max(0) / 63
        return d * np.rint(np.asarray(v) / d)

    d, dmin, scale, minimum, _ = map(np.asarray, super_blocks(x, np.ones_like(x)))
    assert error(d * scale, dmin * minimum) <= 0.97 * error(
        *map(nearest_part, sub_blocks(x, np.ones_like(x), 15))
    )
