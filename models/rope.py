"""Rotary position embedding: pairs of a head's dimensions, rotated by position times frequency."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .config import Config


def frequencies(config: Config, divisors: np.ndarray | None = None) -> np.ndarray:
    """Radians per token of every pair: theta ** (-2i / rope_dim) / factor, float32 (rope_dim / 2,).

    divisors: (rope_dim / 2,), a file's `rope_freqs.weight`: how Llama 3 stretches its low frequencies.
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


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool) -> jax.Array:
    """Rotates the first rope_dim dimensions of every head.

    Args:
      x: (batch, time, heads, head_dim) float32.
      cos, sin: (batch, time, rope_dim / 2).
      interleaved: pairs are dimensions (2i, 2i + 1) if true, (i, i + rope_dim / 2) if not (NEOX).
    """
    half = cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
    else:
        a, b = rotated[..., :half], rotated[..., half:]
    pair = a * cos - b * sin, a * sin + b * cos
    joined = jnp.stack(pair, axis=-1).reshape(rotated.shape) if interleaved else jnp.concatenate(pair, axis=-1)
    return jnp.concatenate([joined, rest], axis=-1) if rest.shape[-1] else joined
