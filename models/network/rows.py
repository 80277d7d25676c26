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


def pooled(x: jax.Array, lengths: jax.Array, pooling: str) -> jax.Array:
    """Pools vectors (batch, time, n) of rows with these lengths, in float32.

    pooling: "mean" over a row's tokens, its "last" or first ("cls") token, or "none". Returns
    (batch, n), or x with "none".
    """
    x = x.astype(jnp.float32)
    if pooling == "none":
        return x
    at = jax.lax.broadcasted_iota(jnp.int32, x.shape[:2], 1)
    if pooling == "mean":
        is_text = at < lengths[:, None]
        total = jnp.sum(x, axis=1, where=is_text[..., None])
        return total / jnp.maximum(lengths, 1)[:, None].astype(jnp.float32)
    if pooling == "cls":
        return x[:, 0]
    return jnp.sum(x, axis=1, where=(at == lengths[:, None] - 1)[..., None])
