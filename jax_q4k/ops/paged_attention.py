"""Attention of one new token per sequence over a paged cache."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ptx_kernels import tuning
from ptx_kernels.kernels.paged_attention import paged_attention as attention_kernel

from ..custom_call import ptx_name
from . import checks
from .op import KernelCall, Op


def paged_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_tables: Any,
    context_lens: Any,
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """softmax(scale * q . K) V over the first context_lens[b] tokens of every sequence, in float32.

    Query head h uses key/value head h // (num_heads / num_kv_heads). Token t of sequence b lies in page
    block_tables[b, t // page_size] at offset t % page_size. A sequence of length 0 gives zeros; a length
    beyond the table counts as the table's capacity; tokens whose page id is outside 0..num_pages-1 are left
    out. What lies in pages beyond a sequence's length, NaN included, does not matter.

    Args:
      q: (batch, num_heads, head_dim) float32.
      k_pages, v_pages: (num_pages, num_kv_heads, page_size, head_dim) float32, bfloat16 or float16; page_size
        a multiple of 16, head_dim one of 32, 64, ..., 256.
      block_tables: (batch, pages_per_sequence) integers.
      context_lens: (batch,) integers.
      scale: None means head_dim ** -0.5.
      implementation: `ptx`, `xla` or `sim`; None takes what `jax_q4k.implementation` selected.

    Returns:
      (batch, num_heads, head_dim) float32.

    Raises:
      TypeError, ValueError: dtypes or shapes that don't fit; outside a traced program also lengths and page
        ids out of range.
    """
    k_pages, v_pages = checks.pages(k_pages, v_pages)
    num_pages, num_kv_heads, page_size, head_dim = k_pages.shape
    q = checks.float_array("q", q)
    if q.dtype != jnp.float32:
        raise TypeError(f"q has dtype {q.dtype}; it must be float32")
    if q.ndim != 3 or q.shape[-1] != head_dim:
        raise ValueError(f"q has shape {q.shape}; it must be (batch, num_heads, head_dim={head_dim})")
    batch, num_heads, _ = q.shape
    if num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
    block_tables = checks.int32_array("block_tables", block_tables)
    context_lens = checks.int32_array("context_lens", context_lens)
    if block_tables.ndim != 2 or block_tables.shape[0] != batch or block_tables.shape[1] < 1:
        raise ValueError(f"block_tables has shape {block_tables.shape}; it must be (batch={batch}, pages_per_sequence)")
    checks.same_shape("context_lens", context_lens, (batch,), "(batch,)")
    scale = head_dim**-0.5 if scale is None else float(scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale={scale} must be positive and finite")
    if batch == 0:
        return jnp.zeros(q.shape, jnp.float32)
    if checks.is_concrete(block_tables, context_lens):
        _check_values(np.asarray(block_tables), np.asarray(context_lens), num_pages, page_size)
    (out,) = _op.bind(q, k_pages, v_pages, block_tables, context_lens, scale=scale, implementation=implementation)
    return out


def reference(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float,
) -> list[jax.Array]:
    """`paged_attention` in plain JAX."""
    num_pages, num_kv_heads, page_size, head_dim = k_pages.shape
    batch, num_heads, _ = q.shape
    capacity = block_tables.shape[1] * page_size
    known = (block_tables >= 0) & (block_tables < num_pages)
    pages = jnp.where(known, block_tables, 0)

    def tokens(all_pages: jax.Array) -> jax.Array:  # (batch, num_kv_heads, capacity, head_dim)
        gathered = jnp.moveaxis(all_pages[pages], 2, 1).astype(jnp.float32)
        return gathered.reshape(batch, num_kv_heads, capacity, head_dim)

    visible = (jnp.arange(capacity) < context_lens[:, None]) & jnp.repeat(known, page_size, axis=1)
    mask = visible[:, None, None, :]
    groups = q.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bhgd,bhtd->bhgt", groups, tokens(k_pages), precision=highest) * scale
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    # Scores masked to -inf stay out of `exp`: -inf minus the -inf top of an empty sequence would be NaN.
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0.0)), 0.0)
    values = jnp.where(visible[:, None, :, None], tokens(v_pages), 0.0)  # 0 * NaN would be NaN
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("bhgt,bhtd->bhgd", weights, values, precision=highest)
    out = jnp.where(jnp.any(mask, axis=-1, keepdims=True), out / total, 0.0)
    return [out.reshape(q.shape)]


def kernels(
    launch: KernelCall,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float,
) -> list[jax.Array]:
    """`paged_attention` by PTX kernels."""
    num_pages, num_kv_heads, page_size, head_dim = k_pages.shape
    batch, num_heads, _ = q.shape
    kernel = attention_kernel(
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_pages=num_pages,
        page_size=page_size,
        pages_per_sequence=block_tables.shape[1],
        scale=scale,
        dtype=ptx_name(k_pages.dtype),
        config=tuning.paged_attention(num_heads, num_kv_heads),
    )
    return launch(kernel, q, k_pages, v_pages, block_tables, context_lens)


def _check_values(block_tables: np.ndarray, context_lens: np.ndarray, num_pages: int, page_size: int) -> None:
    capacity = block_tables.shape[1] * page_size
    if context_lens.min() < 0 or context_lens.max() > capacity:
        raise ValueError(
            f"context_lens={context_lens.tolist()} must be 0 to {capacity}, "
            f"pages_per_sequence={block_tables.shape[1]} times page_size={page_size}"
        )
    used = np.arange(block_tables.shape[1]) * page_size < context_lens[:, None]
    wrong = block_tables[used & ((block_tables < 0) | (block_tables >= num_pages))]
    if wrong.size:
        raise ValueError(f"block_tables holds page {wrong[0]}; pages in use must be 0 to {num_pages - 1}")


def _abstract_eval(q: Any, *_: Any, scale: float) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(q.shape, jnp.float32)]


_op = Op("paged_attention", abstract_eval=_abstract_eval, reference=reference, kernels=kernels)
