"""Helpers to read and write a layer's KV pages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jax_q4k as jq

from ...kv_cache.shapes import Pages


def scales(pages: Pages) -> dict[str, Any]:
    """Returns the scale arguments of operations on int8 pages; empty for other dtypes."""
    held = pages[len(pages) // 2 :] if pages and pages[0].dtype == jnp.int8 else ()
    return dict(zip(("k_scales", "v_scales"), held, strict=False))


def append_latent(pages: Pages, rows: jax.Array, slots: jax.Array) -> Pages:
    """Writes `rows` (tokens, 1, n), latent vectors with shared keys, to slots (tokens,).

    Returns the updated pages.
    """
    return jq.append_kv(pages[0], None, rows, None, slots, **scales(pages))


def repeat_kv_heads(pages: Pages, *new: jax.Array) -> tuple[jax.Array, ...]:
    """Repeats KV heads of `new` (..., heads, head_dim) if devices' pages hold copies of heads."""
    copies = pages[0].shape[1] // new[0].shape[-2] if pages else 1
    return new if copies == 1 else tuple(jnp.repeat(x, copies, axis=-2) for x in new)
