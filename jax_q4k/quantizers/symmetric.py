"""Formats with a scale alone: weight = s * q with q in -top to top - 1.

Weighted least squares: the values are rounded to quants with a number of trial steps; from the
quants the best s follows in closed form, and the trial of least error wins. A trial step is the
value of largest magnitude over a number of levels, of either sign since the range of q is not
symmetric.

Values that already lie on a grid of the format keep it, since whole numbers of levels are among the
trials. In Q6_K, where the scales have to fit in with each other, that takes sub-blocks that use
more than half of their levels.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .fit import SMALLEST_F16, Best, best_of, nearest_f16, reciprocal, rounded, where_less

_SUPER_TOP = 32  # of a super-block's quants: those of Q6_K have six bits


def _trials(top: int, least: int, fractions: int) -> np.ndarray:
    """Numbers of levels: whole ones from `top` down to `least`, parts of one around `top`.

    A negative number lets the largest value reach -top. Its opposite is another trial only where
    that would round to `top` and is clipped: below, it gives the same quants with the other sign.
    """
    parts = top + np.arange(-2 * fractions + 1, fractions) / fractions
    parts = parts[parts % 1 != 0]
    whole = np.arange(top, least - 1, -1)
    return np.concatenate([-whole, -parts, parts[(parts >= top - 0.5) & (parts < top)]])


def _steps(
    x: jax.Array,
    w: jax.Array,
    top: int,
    trials: np.ndarray,
    stored: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Best steps s of x ~ s * q, as `stored` makes them, q in -top to top - 1.

    x and w are (values, ...), s is (...).
    """
    at = jnp.argmax(jnp.abs(x), axis=0)[None]
    over_largest = reciprocal(jnp.take_along_axis(x, at, axis=0)[0])

    def fit(inverse: jax.Array) -> Best:
        """Error and s of the least-squares line through q -> x.

        The quants q are those of step 1 / inverse.
        """
        q = rounded(x * inverse, -top, top - 1)
        wq = w * q
        s = stored((wq * x).sum(0) * reciprocal((wq * q).sum(0)))
        return (w * (s * q - x) ** 2).sum(0), s

    start = (w * x * x).sum(0), jnp.zeros_like(over_largest)
    best = best_of(trials, lambda levels: fit(levels * over_largest), start)
    return where_less(fit(reciprocal(best[1])), best)[1]


def blocks(x: jax.Array, w: jax.Array, top: int) -> tuple[jax.Array, jax.Array]:
    """Quantizes x (32, blocks), errors weighted by w of that shape.

    Returns d, (blocks,) of f16 values, and quants, (32, blocks) in -top to top - 1; both float32.
    """
    d = _steps(x, w, top, _trials(top, 1, 8), nearest_f16)
    return d, rounded(x * reciprocal(d), -top, top - 1)


def super_blocks(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantizes x (16, 16, blocks), errors weighted by w of that shape.

    Returns d, (blocks,) of f16 values, scales (16, blocks), quants (16, 16, blocks), all float32.

    weight = d * scale * q with scales in -128 to 127. Candidates for d are the integer parts of the
    largest step.
    """

    def quants(s: jax.Array) -> jax.Array:
        return rounded(x * reciprocal(s), -_SUPER_TOP, _SUPER_TOP - 1)

    def neighbours(d: jax.Array, scale: jax.Array) -> Best:
        """The best (error of the super-block, d, scales) of the given scales and those beside."""

        def trial(step: jax.Array) -> Best:
            n = jnp.clip(scale + step, -128, 127)
            return (w * (d * n * quants(d * n) - x) ** 2).sum(0), n

        error, n = best_of([0, 1, -1], trial, (jnp.full_like(scale, jnp.inf), scale))
        return error.sum(0), d, n

    trials = _trials(_SUPER_TOP, _SUPER_TOP // 2 + 1, 4)
    s = _steps(x, w, _SUPER_TOP, trials, lambda s: s)
    cost = (w * quants(s) ** 2).sum(0)
    largest = jnp.take_along_axis(s, jnp.argmax(jnp.abs(s), axis=0)[None], axis=0)[0]

    def multiple(parts: jax.Array) -> Best:
        d = nearest_f16(largest / parts)
        d = jnp.where(jnp.abs(d) < SMALLEST_F16, jnp.copysign(SMALLEST_F16, d), d)
        return (cost * (s - d * rounded(s / d, -128, 127)) ** 2).sum(0), d

    parts = np.concatenate([-np.arange(128, 63, -1), np.arange(127, 63, -1)])
    _, d = best_of(
        parts, multiple, (jnp.full_like(largest, jnp.inf), jnp.full_like(largest, SMALLEST_F16))
    )
    best = neighbours(d, rounded(s / d, -128, 127))

    _, d, scale = best
    a = scale * quants(d * scale)  # x ~ d * a
    fitted = nearest_f16((w * a * x).sum((0, 1)) * reciprocal((w * a * a).sum((0, 1))))
    _, d, scale = where_less(neighbours(fitted, scale), best)
    d = jnp.where(jnp.abs(scale).max(0) > 0, d, 0)
    return d, scale, quants(d * scale)
