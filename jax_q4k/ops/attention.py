"""Attention of one new token per sequence over a contiguous KV cache."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from . import checks
from .attend import Operands, attend, checked


def attention(
    q: Any,
    k: Any,
    v: Any,
    lengths: Any,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
) -> jax.Array:
    """softmax(scale * q . K) V over the first lengths[b] tokens of every sequence, in float32.

    Like `paged_attention`, but a sequence's keys and values are contiguous. Data beyond a
    sequence's length has no effect, even NaN.

    Args:
      q: (batch, num_heads, head_dim) float32, bfloat16 or float16.
      k, v: (batch, num_kv_heads, capacity, head_dim); dtypes and head_dim as in `paged_attention`.
      lengths: (batch,) integers; a length beyond the capacity counts as the capacity.
      scale, window, soft_cap, sinks: see `paged_attention`.
      k_scales, v_scales: scales of int8 k and v, (batch, num_kv_heads, capacity) float32.

    Returns:
      (batch, num_heads, head_dim) of q's dtype.

    Raises:
      TypeError, ValueError: dtypes or shapes that don't fit; outside a traced program also lengths
        out of range.
      NotImplementedError: under differentiation; there is no derivative.
    """
    k, v, k_scales, v_scales = checks.contiguous(k, v, k_scales, v_scales)
    batch, _, capacity, head_dim = k.shape
    q, window = checks.query(q, "batch", batch, head_dim), checks.window(window)
    lengths = checks.int32_array("lengths", lengths)
    checks.same_shape("lengths", lengths, (batch,), "(batch,)")
    if checks.is_concrete(lengths) and batch:
        concrete = np.asarray(lengths)
        if concrete.min() < 0 or concrete.max() > capacity:
            raise ValueError(f"lengths={concrete.tolist()} must be 0 to capacity={capacity}")
    operands = Operands(q, k, v, k_scales, v_scales, None, lengths, None, sinks)
    return attend(*checked(operands, scale=scale, window=window, soft_cap=soft_cap))
