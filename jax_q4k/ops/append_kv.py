"""Writes new keys and values into the pages of a KV cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..custom_call import ptx_name
from ..native import calls
from ..sharding.layout import Layout
from . import checks
from .groups import ungrouped
from .op import KernelCall, Op
from .quantize_q8_1 import to_int8


def append_kv(
    k_pages: Any,
    v_pages: Any,
    k: Any,
    v: Any,
    slot_mapping: Any,
    *,
    k_scales: Any = None,
    v_scales: Any = None,
) -> tuple[jax.Array, ...]:
    """Writes k[t] and v[t] to slot slot_mapping[t] of the pages, rounded to the pages' dtype.

    A slot is page * page_size + offset. Slots below 0 (padding) and beyond the last page are
    skipped. If two tokens have the same slot, it is not specified which one is kept. Donated pages
    are updated in place.

    Latent pages are a single array whose rows hold keys and values; v_pages and v are then None.

    Tokens may come in groups, each with its own part of the pages: slots (groups, tokens / groups)
    count from the first slot of the group's part. Groups and their pages may be split over devices.

    Args:
      k_pages, v_pages: (num_pages, num_kv_heads, page_size, head_dim) float32, bfloat16, float16,
        int8 or float8_e4m3fn (saturating at its largest value, 448); page_size a multiple of 16,
        head_dim one of 32, 48, ..., 512. If v_pages is None, k_pages are latent, and head_dim is
        one of 32, 64, ..., 576.
      k, v: (tokens, num_kv_heads, head_dim) float32, bfloat16 or float16.
      slot_mapping: (tokens,) integers, or (groups, tokens / groups).
      k_scales, v_scales: scales of int8 pages, (num_pages, num_kv_heads, page_size) float32. A
        vector's scale is its largest magnitude / 127; its int8 values are value / scale, rounded.
        Latent pages have only k_scales.

    Returns:
      The updated (k_pages, v_pages), or (k_pages, v_pages, k_scales, v_scales) of int8; for latent
      pages (k_pages,) or (k_pages, k_scales).

    Raises:
      TypeError, ValueError: dtypes or shapes that don't fit; outside a traced program also a slot
        beyond the last page.
      NotImplementedError: under differentiation; there is no derivative.
    """
    latent = v_pages is None
    if latent and v is not None:
        raise TypeError("v belongs to v_pages, which is None")
    arrays = (
        checks.latent_pages(k_pages, k_scales, v_scales)
        if latent
        else checks.pages(k_pages, v_pages, k_scales, v_scales)
    )
    pages = tuple(array for array in arrays if array is not None)
    rows, slot_mapping = checks.new_tokens(
        {"k": k} if latent else {"k": k, "v": v}, slot_mapping, pages[0]
    )
    if slot_mapping.size == 0:
        return pages
    check_slots(slot_mapping, pages[0])
    updated: tuple[jax.Array, ...] = op.bind(pages, tuple(rows), slot_mapping)
    return updated


def check_slots(slot_mapping: jax.Array, pages: jax.Array) -> None:
    """Raises ValueError for a slot beyond the last page, unless the slots are traced."""
    groups = slot_mapping.shape[0] if slot_mapping.ndim == 2 else 1
    slots = pages.shape[0] // groups * pages.shape[2]
    if not checks.is_concrete(slot_mapping):
        return
    # in NumPy, because arrays that a traced program closes over are concrete too
    highest = int(np.asarray(slot_mapping).max())
    if highest >= slots:
        raise ValueError(
            f"slot_mapping holds {highest}; slots must be below num_pages * page_size = {slots}"
        )


#: k_pages and v_pages, or latent k_pages alone; then, for int8, the scales of each.
Pages = tuple[jax.Array, ...]
#: New keys and values, or latent keys alone.
Rows = tuple[jax.Array, ...]


def reference(pages: Pages, rows: Rows, slot_mapping: jax.Array) -> Pages:
    """`append_kv` in plain JAX."""
    num_pages, _, page_size, _ = pages[0].shape
    slot_mapping = ungrouped(slot_mapping, 1, num_pages * page_size)
    valid = (slot_mapping >= 0) & (slot_mapping < num_pages * page_size)
    page = jnp.where(valid, slot_mapping // page_size, num_pages)  # num_pages: dropped below
    offset = slot_mapping % page_size
    return tuple(
        old.at[page, :, offset].set(new, mode="drop")
        for old, new in zip(pages, as_stored(rows, pages[0].dtype), strict=True)
    )


def as_stored(rows: Rows, dtype: Any) -> list[jax.Array]:
    """Returns float32 keys and values rounded to the pages' dtype.

    For int8, also returns their float32 scales, in the same shape without head_dim.
    """
    if dtype == jnp.float8_e4m3fn:
        largest = float(jnp.finfo(dtype).max)  # beyond it, the conversion would give NaN
        return [jnp.clip(x, -largest, largest).astype(dtype) for x in rows]
    if dtype != jnp.int8:
        return [x.astype(dtype) for x in rows]
    quants, scales = zip(*map(to_int8, rows), strict=True)
    return [*quants, *scales]


def ptx(launch: KernelCall, pages: Pages, rows: Rows, slot_mapping: jax.Array) -> list[jax.Array]:
    """`append_kv` by a PTX kernel."""
    from ptx_kernels.kernels.append_kv import append_kv as append_kernel

    num_pages, num_kv_heads, page_size, head_dim = pages[0].shape
    slot_mapping = ungrouped(slot_mapping, 1, num_pages * page_size)
    kernel = append_kernel(
        tokens=rows[0].shape[0],
        num_pages=num_pages,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=head_dim,
        dtype=ptx_name(pages[0].dtype),
        latent=len(rows) == 1,
    )
    return launch(kernel, *pages, *rows, slot_mapping)


def native(pages: Pages, rows: Rows, slot_mapping: jax.Array) -> list[jax.Array]:
    """`append_kv` by the native kernels, in place."""
    slot_mapping = ungrouped(slot_mapping, 1, pages[0].shape[0] * pages[0].shape[2])
    return calls.rope_append(pages, (*rows, slot_mapping), rope=False, latent=len(rows) == 1)


def layout_names(slot_mapping: jax.Array) -> tuple[str, str, str]:
    """Returns the Layout's axis names of pages, of new keys and values, and of slots.

    Groups of tokens may be split over devices together with their pages.
    """
    return ("t h", "t h _", "t") if slot_mapping.ndim == 2 else ("_ h", "_ h _", "_")


def _layout(pages: Pages, rows: Rows, slot_mapping: Any) -> Layout:
    of_pages, of_rows, slots = layout_names(slot_mapping)
    return Layout((of_pages, of_rows, slots), of_pages)


op = Op(
    "append_kv",
    reference,
    shapes=lambda pages, *_: tuple(pages),
    ptx=ptx,
    native=native,
    layout=_layout,
    computed=lambda _: (),
)
