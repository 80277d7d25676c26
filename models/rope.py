"""Rotary position embedding: pairs of a head's dimensions, rotated by position times frequency."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_q4k import rotate

from .config import Config

__all__ = ["angles", "frequencies", "rotate"]


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
