"""Gathers, copies and resets rows of recurrent state as sequences join or leave a batch.

Pages need none of this, because block tables assign them to sequences.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .shapes import State


def gather(states: list[State], rows: jax.Array) -> list[State]:
    """Returns the states (n, ...) of batch rows `rows`, int32 (n,), as a new batch.

    Rows may repeat.
    """
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), states)


def copy(states: list[State], source: jax.Array, target: jax.Array) -> list[State]:
    """Returns the states with rows `source`, int32 (n,), copied over rows `target` (n,)."""
    return jax.tree.map(lambda x: x.at[target].set(jnp.take(x, source, axis=0)), states)


def reset(states: list[State], rows: jax.Array) -> list[State]:
    """Returns the states with the rows in mask `rows`, bool (batch,), set to zero (no tokens)."""

    def zeroed(x: jax.Array) -> jax.Array:
        return jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), jnp.zeros_like(x), x)

    return jax.tree.map(zeroed, states)
