"""Converts page ids and slots of groups of sequences to global ones.

Each group has its own part of a KV cache's pages.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ungrouped(ids: jax.Array, dims: int, count: int) -> jax.Array:
    """Converts page ids or slots from group-local to global: (groups * n, ...).

    Ids outside the group's part of the pages become -1. Ids without a group axis are returned
    unchanged.

    Args:
      ids: (groups, n, ...), counted from the first page or slot of their group.
      dims: number of axes of ids without a group axis.
      count: number of pages or slots of all groups together.
    """
    if ids.ndim == dims:
        return ids
    groups = ids.shape[0]
    group_size, rows = count // groups, (-1, *ids.shape[2:])
    if groups == 1:
        return ids.reshape(rows)
    first = group_size * jnp.arange(groups, dtype=jnp.int32).reshape(-1, *[1] * dims)
    known = (ids >= 0) & (ids < group_size)
    return jnp.where(known, ids + first, jnp.int32(-1)).reshape(rows)
