"""Quantizer of Q8_0: equals ggml's bit for bit, and ignores the importance."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from . import pack
from .fit import LARGEST_F16
from .quantizer import Blocks, Quantizer


def _host(x: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """Quantizes float32 (blocks, 32) to uint8 (blocks, 34).

    d = largest magnitude / 127 and q = x * (1 / d), halves rounded away from zero, all in float32.
    Uses NumPy, since XLA may replace a division by a product with the reciprocal.
    """
    d = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    scaled = x * np.divide(1, d, out=np.zeros_like(d), where=d >= np.finfo(np.float32).tiny)
    quants = np.trunc(scaled)
    quants += np.copysign(np.abs(scaled - quants) >= 0.5, scaled)
    return np.concatenate(
        [d.astype("<f2").view(np.uint8), quants.astype(np.int8).view(np.uint8)], axis=-1
    )


def _traced(x: jax.Array, importance: jax.Array) -> jax.Array:
    """Does the same in JAX, where XLA may round d otherwise."""
    d = jnp.abs(x).max(-1) / 127
    usable = d >= np.finfo(np.float32).tiny
    inverse = jnp.where(usable, 1 / jnp.where(usable, d, 1), 0)
    quants = jax.lax.round(x * inverse[:, None])
    quants = jax.lax.bitcast_convert_type(quants.astype(jnp.int8), jnp.uint8)
    return jnp.concatenate([pack.f16_bytes(d), quants], axis=-1)


QUANTIZER = Quantizer("Q8_0", 127 * LARGEST_F16, Blocks(_host, _traced), native=True)
