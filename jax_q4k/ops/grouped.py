"""Grouped matmul of activation rows by their experts' matrices, in plain JAX.

Rows are sorted by expert into blocks of a fixed number of rows. The last block of an expert is
padded with zeros, and the number of blocks is the largest possible one, so that shapes are static.
Each block is one matmul with one decoded matrix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ptx_kernels import formats

from ..arrays import QuantizedArray
from .float_matmul import dot

#: Maximum number of rows of a block, and the number if the number of slots is symbolic.
MAX_BLOCK, SYMBOLIC_BLOCK = 256, 16


class Blocks(NamedTuple):
    """Assignment of slots to blocks of rows; a slot is a pair of a token and one of its experts.

    All rows of a block have the same expert.

    Attributes:
      experts: int32 (blocks,), each block's expert; unspecified for an empty block.
      slots: int32 (blocks, rows), each row's slot; the number of slots for an empty row.
      row: int32 (slots,), each slot's row, counted over all blocks; -1 if its expert is not
        local.
    """

    experts: jax.Array
    slots: jax.Array
    row: jax.Array


def blocks_of(ids: jax.Array, experts: int) -> Blocks:
    """Sorts slots with expert ids (slots,) into Blocks; ids outside 0..experts - 1 get no row."""
    slots = ids.shape[0]
    rows = _block_rows(slots, experts)
    mine = ids[:, None] == jnp.arange(experts, dtype=jnp.int32)[None]  # (slots, experts)
    before = jnp.cumsum(mine, axis=0, dtype=jnp.int32)
    counts = jnp.sum(mine, axis=0, dtype=jnp.int32)
    ends = jnp.cumsum(-(-counts // rows), dtype=jnp.int32)  # blocks up to and including an expert
    starts = ends - -(-counts // rows)
    row = jnp.sum(jnp.where(mine, starts[None] * rows + before, 0), axis=1, dtype=jnp.int32) - 1
    count = slots if rows == 1 else slots // rows + experts
    at = jnp.where(row < 0, count * rows, row)  # out of range: dropped
    filled = jnp.full(count * rows, slots, jnp.int32)
    filled = filled.at[at].set(jnp.arange(slots, dtype=jnp.int32), mode="drop")
    which = jnp.sum(ends[None] <= jnp.arange(count, dtype=jnp.int32)[:, None], axis=1)
    which = jnp.minimum(which, experts - 1).astype(jnp.int32)
    return Blocks(which, filled.reshape(count, rows), row)


def _block_rows(slots: Any, experts: int) -> int:
    """Returns the rows of a block: a power of two, about twice the mean slots per expert."""
    if not isinstance(slots, int):
        return SYMBOLIC_BLOCK
    return min(MAX_BLOCK, 1 << max(0, -(-2 * slots // experts) - 1).bit_length())


def product(x: jax.Array, w: Any, blocks: Blocks, *, shared: int = 1) -> jax.Array:
    """Multiplies each slot's row of x by its expert's matrix transposed: float32 (slots, n).

    A slot whose expert is not local gets zeros. Only one decoded matrix is in memory at a time.

    Args:
      x: float32 (slots / shared, k); `shared` consecutive slots use the same row.
      w: QuantizedArray or float array (experts, n, k).
    """
    count, n = blocks.row.shape[0], w.shape[1]

    def one(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        expert, slots = block
        rows = x[jnp.minimum(slots, count - 1) // shared]
        rows = jnp.where((slots < count)[:, None], rows, 0)
        return dot(rows, matrix(w, expert))

    ys = jax.lax.map(one, (blocks.experts, blocks.slots)).reshape(-1, n)
    here = blocks.row >= 0
    return jnp.where(here[:, None], ys[jnp.where(here, blocks.row, 0)], 0)


def matrix(w: Any, expert: jax.Array) -> jax.Array:
    """Returns the float matrix (n, k) of one expert."""

    def of(stack: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(stack, expert, keepdims=False)

    if isinstance(w, QuantizedArray):
        weights: jax.Array = formats.get(w.format).decode([of(p) for p in w.planes], jnp)
        return weights
    return of(w)
