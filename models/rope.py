"""Rotary position embedding: pairs of a head's dimensions, rotated by position times frequency."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .config import Config, Rope


class Rotation(NamedTuple):
    """Angles of tokens, and how a head's dimensions pair up.

    cos, sin: float32 (..., rope_dim / 2). interleaved: pairs are dimensions (2i, 2i + 1) instead of
    (i, i + rope_dim / 2).
    """

    cos: jax.Array
    sin: jax.Array
    interleaved: bool


def frequencies(rope: Rope, divisors: Any = None) -> np.ndarray:
    """Radians per token of every pair: theta ** (-2i / dim) / factor, float32 (dim / 2,).

    divisors: (dim / 2,), a file's `rope_freqs.weight`: how Llama 3 stretches its low frequencies.
    """
    exponents = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
    radians = rope.theta**-exponents / rope.factor
    if divisors is not None:
        radians = radians / np.asarray(divisors, np.float64)
    return radians.astype(np.float32)


def tables(config: Config, divisors: Any = None) -> list[np.ndarray]:
    """The `frequencies` of each of the config's ropes; windowed layers' own take no divisors."""
    first, *others = config.ropes
    return [frequencies(first, divisors), *map(frequencies, others)]


def angles(positions: jax.Array, frequencies: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, both float32 (..., rope_dim / 2), of positions (...)."""
    every = frequencies.reshape((1,) * positions.ndim + frequencies.shape)
    radians = positions.astype(jnp.float32)[..., None] * every
    return jnp.cos(radians), jnp.sin(radians)
