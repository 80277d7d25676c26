"""Shared code of the scale searches: error weights, rounding, choice of the best trial.

Blocks are the last axis of every array here and in the searches, so that each vector instruction
processes several blocks: x is (values, blocks), or (values, sub-blocks, blocks) if a block has
sub-blocks. Sums over values and sub-blocks are sums over leading axes, and arrays per sub-block or
block broadcast without a reshape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LARGEST_F16 = 65504.0
SMALLEST_F16 = 2.0**-24  # subnormal

Best = tuple[jax.Array, ...]  # an error, and the parameters with that error


def error_weights(x: jax.Array, importance: jax.Array) -> jax.Array:
    """Returns importance * sqrt(1 + x^2 / (2 * mean of x^2 over the block)), of x's shape.

    These are ggml's error weights with an importance matrix, up to a constant factor: errors of
    larger values cost more. The weights are positive wherever the importance is.
    """
    mean = jnp.mean(x * x, axis=tuple(range(x.ndim - 1)))
    return importance * jnp.sqrt(1 + x * x * reciprocal(2 * mean))


def reciprocal(x: jax.Array) -> jax.Array:
    """Returns 1 / x, and 0 where x is 0."""
    return jnp.where(x != 0, 1 / jnp.where(x != 0, x, 1), 0)


def nearest_f16(x: jax.Array) -> jax.Array:
    """Returns the finite f16 nearest to x, as float32."""
    return jnp.clip(x, -LARGEST_F16, LARGEST_F16).astype(jnp.float16).astype(jnp.float32)


def rounded(x: jax.Array, low: float, high: float) -> jax.Array:
    """Returns the nearest integer from `low` to `high`, as float32."""
    return jnp.clip(jnp.round(x), low, high)


def where_less(new: Best, old: Best) -> Best:
    """Returns `new` where its error is below that of `old`, else `old`."""
    return tuple(jnp.where(new[0] < old[0], a, b) for a, b in zip(new, old, strict=True))


def best_of(
    candidates: Sequence[Any] | np.ndarray, evaluate: Callable[[jax.Array], Best], start: Best
) -> Best:
    """Returns, per element, the least-error trial among `start` and evaluate(candidate).

    A trial is a tuple (error, ...). Among equals, the first wins.
    """

    def step(best: Best, candidate: jax.Array) -> tuple[Best, None]:
        return where_less(evaluate(candidate), best), None

    # Of scalars, because XLA's partitioner refuses programs with constant arrays.
    numbers = np.asarray(candidates, np.float32)
    scalars = jnp.stack([jnp.float32(number) for number in numbers.flat])
    return jax.lax.scan(step, start, scalars.reshape(numbers.shape))[0]
