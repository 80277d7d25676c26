"""Rotary position embedding: pairs of a head's dimensions, rotated by position times frequency."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .config import Config


class Rotation(NamedTuple):
    """Angles of tokens, and how a head's dimensions pair up.

    cos, sin: float32 (..., rope_dim / 2). interleaved: pairs are dimensions (2i, 2i + 1) instead of
    (i, i + rope_dim / 2).
    """

    cos: jax.Array
    sin: jax.Array
    interleaved: bool


def frequencies(config: Config, divisors: np.ndarray | None = None) -> np.ndarray:
    """Radians per token of every pair: theta ** (-2i / rope_dim) / factor, float32 (rope_dim / 2,).

    divisors: (rope_dim / 2,), a file's `rope_freqs.weight`: how Llama 3 stretches its low
    frequencies.
    """
    exponents = np.arange(0, config.rope_dim, 2, dtype=np.float64) / config.rope_dim
    radians = config.rope_theta**-exponents / config.rope_factor
    if divisors is not None:
        radians = radians / np.asarray(divisors, np.float64)
    return radians.astype(np.float32)


def angles(positions: jax.Array, frequencies: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, both float32 (..., rope_dim / 2), of positions (...)."""
    radians = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(radians), jnp.sin(radians)
