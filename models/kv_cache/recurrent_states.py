"""Gathers, copies and resets rows of recurrent state as sequences join or leave a batch.

Pages need none of this, because block tables assign them to sequences.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .shapes import State


def gather(states: list[State], rows: jax.Array) -> list[State]:
    """Builds the states (n, ...) of a new batch from `rows`, int32 (n,), which may repeat."""
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), states)


def copy(states: list[State], source: jax.Array, target: jax.Array) -> list[State]:
    """Copies rows `source`, int32 (n,), over rows `target` (n,)."""
    return jax.tree.map(lambda x: x.at[target].set(jnp.take(x, source, axis=0)), states)


def reset(states: list[State], rows: jax.Array) -> list[State]:
    """Zeroes the rows of the mask `rows`, bool (batch,), as for sequences without tokens."""

    def zeroed(x: jax.Array) -> jax.Array:
        return jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), jnp.zeros_like(x), x)

    return jax.tree.map(zeroed, states)
