"""Page ids and slots of groups of sequences, each with its own part of a cache's pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ungrouped(ids: jax.Array, kept: int, count: int) -> jax.Array:
    """Converts ids (groups, n, ...) within each group's part to global ids (groups * n, ...).

    Ids outside the group's part become -1. Ids without a group axis are returned unchanged.

    Args:
      kept: number of axes of ids without groups.
      count: pages or slots of all groups.
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
