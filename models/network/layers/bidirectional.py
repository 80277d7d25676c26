"""Attention of encoders, in which tokens attend to those before and after them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .attention import Fresh, Norms

#: Queries whose scores are in memory at a time.
BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Whole(Fresh):
    """Keys and values of a layer in a pass over whole texts, with attention to all tokens.

    Attributes:
      rotates: whether queries and keys are rotated.
      alibi: exponent of ALiBi's smallest slope, as in `Architecture.alibi`; 0: no ALiBi.
    """

    rotates: bool = True
    alibi: float = 0.0

    def append(
        self,
        q: Array,
        k: Array,
        v: Array,
        norms: Norms,
        q_rest: int = 0,
        value_eps: float | None = None,
    ) -> tuple[Array, Array | None, Whole]:
        """Normalizes and rotates queries and keys; returns q, None, and self with k and v."""
        assert not q_rest and value_eps is None  # no encoder has an output gate or normal values
        if self.rotates:
            return super().append(q, k, v, norms)  # type: ignore[return-value]
        q, k = (x if norm is None else norm(x) for x, norm in zip((q, k), norms, strict=True))
        return q, None, dataclasses.replace(self, k=k, v=v)

    def attention(self, q: Array, **seen: Any) -> Array:
        """Returns attention of q (batch, time, num_heads, head_dim) to all tokens of its text.

        seen: `window`, `scale` and `soft_cap`, as in `attention`.
        """
        assert self.k is not None and self.v is not None
        slopes = alibi_slopes(q.shape[2], self.alibi) if self.alibi else None
        return attention(q, self.k, self.v, self.lengths, slopes=slopes, **seen)


def attention(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    *,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    slopes: np.ndarray | None = None,
) -> Array:
    """Computes softmax attention of every token to the tokens before and after it, in float32.

    Scores of long texts are computed for `BLOCK` queries at a time.

    Args:
      q: (batch, time, num_heads, head_dim). k, v: (batch, time, num_kv_heads, head_dim).
      lengths: int32 (batch,), tokens of each row before padding.
      window: tokens attend to those up to window // 2 before and after them; None means to all.
      scale: factor of scores; None means head_dim ** -0.5.
      soft_cap: scores become soft_cap * tanh(score / soft_cap); None means no cap.
      slopes: float32 (num_heads,), subtracts slope * distance from scores; None means 0.

    Returns:
      q's shape and dtype; unspecified for padding.
    """
    batch, time, heads, head_dim = q.shape
    groups = k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    queries = (q.astype(jnp.float32) * scale).reshape(batch, time, groups, -1, head_dim)
    keys, values = k.astype(jnp.float32), v.astype(jnp.float32)
    at = jnp.arange(time, dtype=jnp.int32)
    is_text = at[None] < lengths[:, None]

    def attend(block: Array, first: Array | int) -> Array:
        """Returns the results of queries (batch, count, ...) from position `first` on."""
        scores = jnp.einsum("bqghd,bkgd->bghqk", block, keys, precision="highest")
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        own = first + jnp.arange(block.shape[1], dtype=jnp.int32)
        distance = jnp.abs(own[:, None] - at[None])
        if slopes is not None:
            by_head = slopes.reshape(1, groups, -1, 1, 1)
            scores = scores - by_head * distance.astype(jnp.float32)[None, None, None]
        seen = is_text[:, None, None, None]
        if window is not None:
            seen = seen & (distance <= window // 2)[None, None, None]
        # Finite, because rows of padding may see nothing.
        scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1)
        return jnp.einsum("bghqk,bkgd->bqghd", weights, values, precision="highest")

    if time <= BLOCK:
        found = attend(queries, 0)
    else:
        count = -(-time // BLOCK)
        padding = [(0, 0)] * queries.ndim
        padding[1] = 0, count * BLOCK - time
        blocks = jnp.pad(queries, padding).reshape(batch, count, BLOCK, *queries.shape[2:])
        firsts = BLOCK * jnp.arange(count, dtype=jnp.int32)
        parts = jax.lax.map(lambda part: attend(*part), (jnp.moveaxis(blocks, 1, 0), firsts))
        found = jnp.moveaxis(parts, 0, 1).reshape(batch, count * BLOCK, *queries.shape[2:])
        found = found[:, :time]
    return found.reshape(q.shape).astype(q.dtype)


def alibi_slopes(heads: int, exponent: float) -> np.ndarray:
    """Returns ALiBi's slope of each head, float32 (heads,).

    With n heads, a power of 2, these are 2 ** (-exponent * i / n) for i from 1 to n. Other numbers
    of heads take every other slope of 2 n heads after those of the largest such n.
    """
    whole = 1 << int(math.log2(heads))
    exponents = [exponent * i / whole for i in range(1, whole + 1)]
    exponents += [exponent * i / (2 * whole) for i in range(1, 2 * (heads - whole), 2)]
    return np.exp2(-np.array(exponents)).astype(np.float32)
