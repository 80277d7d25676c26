"""Quantizes to formats with only a scale: weight = s * q with q from a grid.

The search is weighted least squares: the values are rounded to the grid with a number of trial
steps. Given the quants, the best s has a closed form, and the trial with the least error wins. A
trial step is the value of largest magnitude divided by a level, which may have either sign because
a grid is not symmetric.

Values that already lie on a grid of the format stay on it, since their quants are among the levels
tried. If sub-blocks share a d, this requires sub-blocks that use more than half of their levels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .fit import SMALLEST_F16, Best, best_of, nearest_f16, reciprocal, rounded, where_less


class Grid(NamedTuple):
    """The numbers q that a format's weights s * q can use.

    Attributes:
      nearest: rounds floats to the nearest q, as float32.
      levels: levels to try for the value of largest magnitude.
    """

    nearest: Callable[[jax.Array], jax.Array]
    levels: np.ndarray


def integers(top: int, minimum: int = 1, fractions: int = 8) -> Grid:
    """Returns the Grid of the integers from -top to top - 1.

    Its levels to try are integers down to `minimum`, and fractions near `top`.

    A negative level lets the largest value reach -top. The opposite level is tried only if it would
    round to `top` and be clipped; smaller ones give the same quants with the other sign.
    """
    parts = top + np.arange(-2 * fractions + 1, fractions) / fractions
    parts = parts[parts % 1 != 0]
    integral = np.arange(top, minimum - 1, -1)
    levels = np.concatenate([-integral, -parts, parts[(parts >= top - 0.5) & (parts < top)]])
    return Grid(lambda x: rounded(x, -top, top - 1), levels)


def table(entries: Sequence[int], margin: int) -> Grid:
    """Returns the Grid of an ascending table's entries.

    Its levels to try are the entries, and integers up to `margin` around both ends.
    """
    numbers = np.array(entries, np.float32)

    def nearest(x: jax.Array) -> jax.Array:
        found = jnp.full_like(x, numbers[0])
        for low, high in itertools.pairwise(numbers):
            found = jnp.where(x > (low + high) / 2, high, found)
        return found

    offsets = np.arange(-margin, margin + 1)
    ends = np.concatenate([numbers[0] + offsets, numbers[-1] + offsets])
    return Grid(nearest, np.unique(np.concatenate([numbers, ends])))


def _steps(
    x: jax.Array, w: jax.Array, grid: Grid, stored: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Finds the best steps s of x ~ s * q with q from the grid; `stored` rounds s to its format.

    x and w are (values, ...), s is (...).
    """
    at = jnp.argmax(jnp.abs(x), axis=0)[None]
    over_largest = reciprocal(jnp.take_along_axis(x, at, axis=0)[0])

    def fit(inverse: jax.Array) -> Best:
        """Rounds x with step 1 / inverse, then fits x ~ s * q by least squares.

        Returns the error and s.
        """
        q = grid.nearest(x * inverse)
        wq = w * q
        s = stored((wq * x).sum(0) * reciprocal((wq * q).sum(0)))
        return (w * (s * q - x) ** 2).sum(0), s

    start = (w * x * x).sum(0), jnp.zeros_like(over_largest)
    best = best_of(grid.levels, lambda level: fit(level * over_largest), start)
    return where_less(fit(reciprocal(best[1])), best)[1]


def blocks(x: jax.Array, w: jax.Array, grid: Grid) -> tuple[jax.Array, jax.Array]:
    """Quantizes x (32, blocks), errors weighted by w of that shape.

    Returns d, (blocks,) of f16 values, and quants of the grid, (32, blocks); both float32.
    """
    d = _steps(x, w, grid, nearest_f16)
    return d, grid.nearest(x * reciprocal(d))


def super_blocks(
    x: jax.Array, w: jax.Array, grid: Grid, maximum: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantizes x (values, sub-blocks, blocks), errors weighted by w of that shape.

    weight = d * scale * q with scales in -maximum to maximum - 1. Candidates for d are the
    largest step divided by integers.

    Returns d, (blocks,) of f16 values, scales (sub-blocks, blocks), quants of x's shape, all
    float32.
    """

    def quants(s: jax.Array) -> jax.Array:
        return grid.nearest(x * reciprocal(s))

    def neighbours(d: jax.Array, scale: jax.Array) -> Best:
        """Returns the best (error of the super-block, d, scales) among scales up to 1 away."""

        def trial(step: jax.Array) -> Best:
            n = jnp.clip(scale + step, -maximum, maximum - 1)
            return (w * (d * n * quants(d * n) - x) ** 2).sum(0), n

        error, n = best_of([0, 1, -1], trial, (jnp.full_like(scale, jnp.inf), scale))
        return error.sum(0), d, n

    s = _steps(x, w, grid, lambda s: s)
    cost = (w * quants(s) ** 2).sum(0)
    largest = jnp.take_along_axis(s, jnp.argmax(jnp.abs(s), axis=0)[None], axis=0)[0]

    def multiple(parts: jax.Array) -> Best:
        d = nearest_f16(largest / parts)
        d = jnp.where(jnp.abs(d) < SMALLEST_F16, jnp.copysign(SMALLEST_F16, d), d)
        return (cost * (s - d * rounded(s / d, -maximum, maximum - 1)) ** 2).sum(0), d

    parts = np.arange(maximum, maximum // 2 - 1, -1)
    parts = np.concatenate([-parts, parts[1:]])
    _, d = best_of(
        parts, multiple, (jnp.full_like(largest, jnp.inf), jnp.full_like(largest, SMALLEST_F16))
    )
    best = neighbours(d, rounded(s / d, -maximum, maximum - 1))

    _, d, scale = best
    a = scale * quants(d * scale)  # x ~ d * a
    fitted = nearest_f16((w * a * x).sum((0, 1)) * reciprocal((w * a * a).sum((0, 1))))
    _, d, scale = where_less(neighbours(fitted, scale), best)
    d = jnp.where(jnp.abs(scale).max(0) > 0, d, 0)
    return d, scale, quants(d * scale)
