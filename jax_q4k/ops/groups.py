"""Page ids and slots of groups of sequences, each with its part of a cache's pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ungrouped(ids: jax.Array, kept: int, count: int) -> jax.Array:
    """Ids that count from the first of all, (groups * n, ...), of ids (groups, n, ...).

    Ids that are none of the group's own become -1. Ids without an axis of groups stay.

    Args:
      kept: axes of ids without groups.
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
