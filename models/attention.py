"""Causal attention over fresh keys and values, in plain JAX: what a prompt's pass uses."""

from __future__ import annotations

import jax
import jax.numpy as jnp

#: Queries scored at a time; it bounds the scores in memory to batch * num_heads * QUERY_BLOCK * time floats.
QUERY_BLOCK = 256


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    """softmax(q . K / sqrt(head_dim)) V over each token's own past, in float32.

    Tokens at or beyond lengths[b] are padding: whatever they hold, the others' results are the same.

    Args:
      q: (batch, time, num_heads, head_dim).
      k, v: (batch, time, num_kv_heads, head_dim); query head h uses head h // (num_heads / num_kv_heads).
      lengths: int32 (batch,).

    Returns:
      (batch, time, num_heads, head_dim).
    """
    batch, time, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    positions = jnp.arange(time)
    real = (positions < lengths[:, None])[:, :, None, None]
    k, v = jnp.where(real, k, 0.0), jnp.where(real, v, 0.0)  # 0 * NaN would be NaN
    q = (q * head_dim**-0.5).reshape(batch, time, num_kv_heads, num_heads // num_kv_heads, head_dim)

    def block(queries: jax.Array, at: jax.Array) -> jax.Array:
        highest = jax.lax.Precision.HIGHEST
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", queries, k, precision=highest)
        scores = jnp.where(positions <= at[:, None], scores, -jnp.inf)
        return jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores, axis=-1), v, precision=highest)

    if time <= QUERY_BLOCK:
        return block(q, positions).reshape(batch, time, num_heads, head_dim)
    padded = -(-time // QUERY_BLOCK) * QUERY_BLOCK
    q = jnp.pad(q, ((0, 0), (0, padded - time), (0, 0), (0, 0), (0, 0)))
    q = jnp.moveaxis(q.reshape(batch, -1, QUERY_BLOCK, *q.shape[2:]), 1, 0)
    out = jax.lax.map(lambda args: block(*args), (q, jnp.arange(padded).reshape(-1, QUERY_BLOCK)))
    return jnp.moveaxis(out, 0, 1).reshape(batch, padded, num_heads, head_dim)[:, :time]
