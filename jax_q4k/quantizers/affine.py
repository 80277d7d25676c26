"""Quantizes to formats with a scale and a minimum: weight = s * q - m with q in 0 to `top`.

The search is weighted least squares in three steps. First, each sub-block alone: the values are
rounded to quants with a number of trial steps. Given the quants, the best s and m have a closed
form, and the trial with the least error wins. Second, the super-block: all s, and likewise all m,
must be an f16 d times integers of 0 to 63 (0 to 15 in Q2_K). Candidates for d are the largest
values divided by integers. Third, scales and minimums one step up or down are tried with quants
rounded again; then d and dmin are fitted to the quants of the super-block, and this is repeated.

Values that already lie on a grid of the format stay on it if they determine the grid. A trial step
is a sub-block's range divided by an integer number of levels, so one of them is exact, and the
candidates for d include the original d. This requires sub-blocks that use at least about half of
their levels and whose smallest value is not above zero. For a few distinct values, or for positive
ones, the first grid that fits may not be compatible with those of the other sub-blocks. A second
quantization then differs from the first, but only by the error of any quantization of such values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .fit import SMALLEST_F16, Best, best_of, nearest_f16, reciprocal, rounded, where_less

#: Levels by which a sub-block's quants may move up to bring its minimum to a multiple of dmin.
_SHIFTS = 4
# Changes to a sub-block's (scale, min, quants). The last is in whole levels, with the min that then
# fits best.
_STEPS = [(n, m, 0) for n in (0, 1, -1) for m in (0, 1, -1)] + [(0, 0, t) for t in (1, -1, 2, -2)]


def levels(top: int) -> np.ndarray:
    """Returns how many levels to try between a sub-block's lowest and highest value.

    Thirds near `top`, and whole ones farther below. Finer ones gain less than 0.1%, farther ones
    nothing except for values that lie on a grid.
    """
    thirds = np.arange(5, -31, -1)
    thirds = thirds[(thirds > 3 * (1 - top)) & ((thirds > -top) | (thirds % 3 == 0))]
    return top + thirds / 3


def sub_blocks(
    x: jax.Array, w: jax.Array, top: int, lowest: float = 0
) -> tuple[jax.Array, jax.Array]:
    """Fits x ~ s * q - m with q in 0 to `top` and m >= -`lowest`; returns the best s and m.

    x and w are (values, ...), s and m (...).
    """
    low = jnp.minimum(x.min(0), lowest)
    span, y = x.max(0) - low, x - low
    sum_w, sum_wy = w.sum(0), (w * y).sum(0)

    def fit(q: jax.Array) -> Best:
        """Fits x ~ s * q + offset by least squares; returns (error up to a constant, s, offset)."""
        wq = w * q
        sum_q, sum_qq, sum_qy = wq.sum(0), (wq * q).sum(0), (wq * y).sum(0)
        over_determinant = reciprocal(sum_w * sum_qq - sum_q * sum_q)
        s = (sum_w * sum_qy - sum_wy * sum_q) * over_determinant
        offset = (sum_wy * sum_qq - sum_q * sum_qy) * over_determinant
        above = offset > lowest - low
        offset = jnp.where(above, lowest - low, offset)
        s = jnp.where(above, (sum_qy - offset * sum_q) * reciprocal(sum_qq), s)
        gain = s * (2 * sum_qy - s * sum_qq - 2 * offset * sum_q) + offset * (
            2 * sum_wy - offset * sum_w
        )
        return -gain, s, offset

    over_span, zero = reciprocal(span), jnp.zeros_like(low)
    best = best_of(
        levels(top),
        lambda level: fit(rounded(y * (level * over_span), 0, top)),
        (zero, zero, zero),
    )
    _, s, offset = where_less(fit(rounded((y - best[2]) * reciprocal(best[1]), 0, top)), best)
    return s, -(offset + low)


def blocks(x: jax.Array, w: jax.Array, top: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantizes x (32, blocks), errors weighted by w of that shape: weight = d * q + m.

    Returns d and m, (blocks,) of f16 values, and quants q, (32, blocks) of 0 to `top`.
    """
    s, minimum = sub_blocks(x, w, top, jnp.inf)

    def quants(d: jax.Array, m: jax.Array) -> jax.Array:
        return rounded((x - m) * reciprocal(d), 0, top)

    def trial(step: jax.Array) -> Best:
        d = jnp.maximum(nearest_f16(s + step[0] * jnp.maximum(s * 2.0**-11, SMALLEST_F16)), 0)
        m = nearest_f16((w * (x - d * quants(d, -minimum - step[1] * d))).sum(0) / w.sum(0))
        return (w * (d * quants(d, m) + m - x) ** 2).sum(0), d, m

    start = (jnp.full_like(s, jnp.inf), s, -minimum)
    # The nearest f16 and its neighbors; then quants moved up, so that m falls on another f16.
    steps = [(0, 0), (1, 0), (-1, 0)] + [(0, shift) for shift in range(1, _SHIFTS + 1)]
    _, d, m = best_of(steps, trial, start)
    return d, m, quants(d, m)


def _multiples(
    choices: Sequence[jax.Array], cost: jax.Array, maximum: int
) -> tuple[jax.Array, jax.Array]:
    """Finds f16 d (blocks,) and integers n (sub-blocks, blocks), 0 to `maximum`: d * n ~ values.

    `cost` weights the errors. It and every choice are (sub-blocks, blocks). Of the `choices` for a
    value, the one nearest to a multiple of d counts. Candidates for d are the three largest first
    choices divided by integers.
    """
    largest = jax.lax.top_k(choices[0].T, 3)[0].T

    def nearest(d: jax.Array) -> Best:
        """Returns the multiples n of d (..., blocks) that are nearest to the values.

        Returns (distance, n), both (sub-blocks, ..., blocks).
        """

        def distance(values: jax.Array) -> Best:
            values = values.reshape(len(values), *(1,) * (d.ndim - 1), -1)
            n = rounded(values * (1 / d), 0, maximum)
            return jnp.abs(values - d * n), n

        return functools.reduce(
            lambda best, values: where_less(distance(values), best),
            choices[1:],
            distance(choices[0]),
        )

    def trial(parts: jax.Array) -> Best:
        d = jnp.maximum(nearest_f16(largest / parts), SMALLEST_F16)
        error = (cost[:, None] * nearest(d)[0] ** 2).sum(0)
        return jnp.where(d * (maximum + 0.5) < largest[0], jnp.inf, error), d

    start = (jnp.full_like(largest, jnp.inf), jnp.full_like(largest, SMALLEST_F16))
    error, d = best_of(np.arange(maximum, maximum // 4, -1), trial, start)
    d = jnp.take_along_axis(d, jnp.argmin(error, axis=0)[None], axis=0)[0]
    return d, nearest(d)[1]


def super_blocks(x: jax.Array, w: jax.Array, top: int, maximum: int = 63) -> tuple[jax.Array, ...]:
    """Quantizes x (values, sub-blocks, blocks), errors weighted by w of that shape.

    weight = d * scale * q - dmin * min with scales and mins of 0 to `maximum`; d and dmin are
    non-negative f16 values.

    Returns d, dmin (blocks,), scales, mins (sub-blocks, blocks), quants of x's shape, all float32.
    """
    sum_w = w.sum(0)

    def quants(s: jax.Array, m: jax.Array) -> jax.Array:
        return rounded((x + m) * reciprocal(s), 0, top)

    def best_m(s: jax.Array, q: jax.Array) -> jax.Array:
        return (w * (s * q - x)).sum(0) / sum_w

    def neighbours(d: jax.Array, dmin: jax.Array, scale: jax.Array, minimum: jax.Array) -> Best:
        """Returns the best (error of the super-block, d, dmin, scales, mins) within a few steps."""
        s = d * scale
        m = best_m(s, quants(s, dmin * minimum))

        def trial(step: jax.Array) -> Best:
            n = jnp.clip(scale + step[0], 0, maximum)
            moved = jnp.round((m + step[2] * s) * reciprocal(dmin))
            n_min = jnp.clip(jnp.where(step[2] == 0, minimum + step[1], moved), 0, maximum)
            return (
                (w * (d * n * quants(d * n, dmin * n_min) - dmin * n_min - x) ** 2).sum(0),
                n,
                n_min,
            )

        error, *integers = best_of(_STEPS, trial, (jnp.full_like(scale, jnp.inf), scale, minimum))
        return error.sum(0), d, dmin, *integers

    s, m = sub_blocks(x, w, top)
    q = quants(s, m)
    # the cost of an error in s when m compensates for it
    spread = (w * q * q).sum(0) - (w * q).sum(0) ** 2 / sum_w
    d, scale = _multiples([s], jnp.maximum(spread, 0), maximum)
    s = d * scale
    m = jnp.maximum(best_m(s, quants(s, m)), 0)
    room = top - quants(s, m).max(0)
    dmin, minimum = _multiples(
        [m + jnp.minimum(room, shift) * s for shift in range(_SHIFTS + 1)], sum_w, maximum
    )
    best = neighbours(d, dmin, scale, minimum)

    _, d, dmin, scale, minimum = best
    a, b = scale * quants(d * scale, dmin * minimum), -minimum  # x ~ d * a + dmin * b
    aa, ab, bb, ax, bx = (
        (w * product).sum((0, 1)) for product in (a * a, a * b, b * b, a * x, b * x)
    )
    determinant = aa * bb - ab * ab
    solvable = determinant > 1e-6 * aa * bb  # otherwise rounding errors decide
    fitted = nearest_f16(
        jnp.where(
            solvable,
            (bb * ax - ab * bx) * reciprocal(determinant),
            (ax - ab * dmin) * reciprocal(aa),
        )
    )
    fitted_min = nearest_f16(
        jnp.where(solvable, (aa * bx - ab * ax) * reciprocal(determinant), dmin)
    )
    refined = neighbours(jnp.maximum(fitted, 0), jnp.maximum(fitted_min, 0), scale, minimum)
    _, d, dmin, scale, minimum = where_less(refined, best)

    d, dmin = (jnp.where(n.max(0) > 0, f, 0) for f, n in ((d, scale), (dmin, minimum)))
    return d, dmin, scale, minimum, quants(d * scale, dmin * minimum)
