"""Parts of the searches for scales: weights of the errors, rounding, keeping the better of two.

Blocks are the last axis of every array here and in the searches, so that all of them go through
each vector instruction together: x is (values, blocks), or (values, sub-blocks, blocks) where a
block has sub-blocks. Sums over values and sub-blocks are sums over leading axes, and what belongs
to a sub-block or block broadcasts as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LARGEST_F16 = 65504.0
SMALLEST_F16 = 2.0**-24  # subnormal

Best = tuple[jax.Array, ...]  # an error, and what gives it


def error_weights(x: jax.Array, importance: jax.Array) -> jax.Array:
    """importance * sqrt(1 + x^2 / (2 * mean of x^2 over the block)), of x's shape.

    What ggml takes where it has an importance matrix, up to a constant factor: an error costs the
    more the larger the weight is that it falls on. Positive wherever the importance is.
    """
    mean = jnp.mean(x * x, axis=tuple(range(x.ndim - 1)))
    return importance * jnp.sqrt(1 + x * x * reciprocal(2 * mean))


def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x, and 0 where x is 0."""
    return jnp.where(x != 0, 1 / jnp.where(x != 0, x, 1), 0)


def nearest_f16(x: jax.Array) -> jax.Array:
    """The finite f16 nearest to x, as float32."""
    return jnp.clip(x, -LARGEST_F16, LARGEST_F16).astype(jnp.float16).astype(jnp.float32)


def rounded(x: jax.Array, low: float, high: float) -> jax.Array:
    """The nearest integer from `low` to `high`, as float32."""
    return jnp.clip(jnp.round(x), low, high)


def where_less(new: Best, old: Best) -> Best:
    """`new` where its error is below that of `old`, else `old`."""
    return tuple(jnp.where(new[0] < old[0], a, b) for a, b in zip(new, old, strict=True))


def best_of(
    candidates: Sequence[Any] | np.ndarray, evaluate: Callable[[jax.Array], Best], start: Best
) -> Best:
    """The (error, ...) of least error among `start` and evaluate(candidate).

    Of equals the first counts.
    """

    def step(best: Best, candidate: jax.Array) -> tuple[Best, None]:
        return where_less(evaluate(candidate), best), None

    return jax.lax.scan(step, start, jnp.asarray(candidates, jnp.float32))[0]
