"""Reshapes and indexes hidden states (batch, time, ...)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def flat_rows(x: jax.Array) -> jax.Array:
    """Reshapes (batch, time, ...) to (batch * time, ...)."""
    return x.reshape(-1, *x.shape[2:])


def last_tokens(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns the hidden state of each row's last token, (batch, n), from x (batch, time, n)."""
    at = jnp.maximum(lengths - 1, 0)
    return jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
