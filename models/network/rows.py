"""Rows of activations (batch, time, ...)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def flat_rows(x: jax.Array) -> jax.Array:
    """(batch, time, ...) -> (batch * time, ...)."""
    return x.reshape(-1, *x.shape[2:])


def last_tokens(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Each row's last token, (batch, n), of vectors (batch, time, n)."""
    at = jnp.maximum(lengths - 1, 0)
    return jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
