"""Gathers, copies and resets rows of recurrent state as sequences join or leave a batch.

Pages need none of this: a sequence's block table says which are its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .shapes import State


def gather(states: list[State], rows: jax.Array) -> list[State]:
    """States (n, ...) of rows int32 (n,): a batch put together anew, some rows several times."""
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), states)


def copy(states: list[State], source: jax.Array, target: jax.Array) -> list[State]:
    """States with the rows `source` int32 (n,) also in the place of the rows `target` (n,)."""
    return jax.tree.map(lambda x: x.at[target].set(jnp.take(x, source, axis=0)), states)


def reset(states: list[State], rows: jax.Array) -> list[State]:
    """States with zeros in rows bool (batch,), as those of sequences without tokens."""

    def zeroed(x: jax.Array) -> jax.Array:
        return jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), jnp.zeros_like(x), x)

    return jax.tree.map(zeroed, states)
