"""Converts page ids and slots of groups of sequences to global ones.

Each group has its own part of a KV cache's pages.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ungrouped(ids: jax.Array, kept: int, count: int) -> jax.Array:
    """Converts page ids or slots from group-local to global: (groups * n, ...).

    Ids outside the group's part of the pages become -1. Ids without a group axis are returned
    unchanged.

    Args:
      ids: (groups, n, ...), counted from the first page or slot of their group.
      kept: number of axes of ids without a group axis.
      count: number of pages or slots of all groups together.
    """
    if ids.ndim == kept:
        return ids
    groups = ids.shape[0]
    own, rows = count // groups, (-1, *ids.shape[2:])
    if groups == 1:
        return ids.reshape(rows)
    first = own * jnp.arange(groups, dtype=jnp.int32).reshape(-1, *[1] * kept)
    known = (ids >= 0) & (ids < own)
    return jnp.where(known, ids + first, jnp.int32(-1)).reshape(rows)
