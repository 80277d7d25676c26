"""New keys and values written into a cache's pages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ptx_kernels.kernels.append_kv import append_kv as append_kernel

from ..custom_call import ptx_name
from . import checks
from .op import KernelCall, Op


def append_kv(
    k_pages: Any, v_pages: Any, k: Any, v: Any, slot_mapping: Any, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Writes k[t] and v[t] at slot slot_mapping[t] of the pages, rounded to the pages' dtype.

    A slot is page * page_size + offset. A slot below 0 is skipped (padding), and so is one beyond the last
    page. Two tokens of one slot: which of them is kept is not specified. The updated pages take the place of
    the old ones where those are donated.

    Args:
      k_pages, v_pages: (num_pages, num_kv_heads, page_size, head_dim) float32, bfloat16 or float16; page_size
        a multiple of 16, head_dim one of 32, 64, ..., 256.
      k, v: (tokens, num_kv_heads, head_dim) float32.
      slot_mapping: (tokens,) integers.
      implementation: `ptx`, `xla` or `sim`; None takes what `jax_q4k.implementation` selected.

    Returns:
      The updated (k_pages, v_pages).

    Raises:
      TypeError, ValueError: dtypes or shapes that don't fit; outside a traced program also a slot beyond
        the last page.
    """
    k_pages, v_pages = checks.pages(k_pages, v_pages)
    _, num_kv_heads, _, head_dim = k_pages.shape
    k, v = checks.float_array("k", k), checks.float_array("v", v)
    slot_mapping = checks.int32_array("slot_mapping", slot_mapping)
    if slot_mapping.ndim != 1:
        raise ValueError(f"slot_mapping has shape {slot_mapping.shape}; it must be (tokens,)")
    expected = (slot_mapping.shape[0], num_kv_heads, head_dim)
    for name, new in (("k", k), ("v", v)):
        checks.same_shape(name, new, expected, "(tokens, num_kv_heads, head_dim)")
        if new.dtype != jnp.float32:
            raise TypeError(f"{name} has dtype {new.dtype}; it must be float32")
    if slot_mapping.shape[0] == 0:
        return k_pages, v_pages
    check_slots(slot_mapping, k_pages)
    k_pages, v_pages = _op.bind(k_pages, v_pages, k, v, slot_mapping, implementation=implementation)
    return k_pages, v_pages


def check_slots(slot_mapping: jax.Array, pages: jax.Array) -> None:
    """Raises ValueError for a slot beyond the last page, where the slots can be looked at."""
    slots = pages.shape[0] * pages.shape[2]
    if checks.is_concrete(slot_mapping) and int(slot_mapping.max()) >= slots:
        raise ValueError(
            f"slot_mapping holds {int(slot_mapping.max())}; slots must be below num_pages * page_size = {slots}"
        )


def reference(
    k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array
) -> list[jax.Array]:
    """`append_kv` in plain JAX."""
    num_pages, _, page_size, _ = k_pages.shape
    valid = (slot_mapping >= 0) & (slot_mapping < num_pages * page_size)
    page = jnp.where(valid, slot_mapping // page_size, num_pages)  # a page beyond the last: dropped
    offset = slot_mapping % page_size
    return [
        pages.at[page, :, offset].set(new.astype(pages.dtype), mode="drop")
        for pages, new in ((k_pages, k), (v_pages, v))
    ]


def kernels(
    launch: KernelCall,
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
) -> list[jax.Array]:
    """`append_kv` by PTX kernels."""
    num_pages, num_kv_heads, page_size, head_dim = k_pages.shape
    kernel = append_kernel(
        tokens=k.shape[0],
        num_pages=num_pages,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=head_dim,
        dtype=ptx_name(k_pages.dtype),
    )
    return launch(kernel, k_pages, v_pages, k, v, slot_mapping)


def _abstract_eval(k_pages: Any, v_pages: Any, *_: Any) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(p.shape, p.dtype) for p in (k_pages, v_pages)]


_op = Op("append_kv", abstract_eval=_abstract_eval, reference=reference, kernels=kernels)
