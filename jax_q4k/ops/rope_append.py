"""Applies rotary embeddings to queries and keys, and writes keys and values to the KV cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..custom_call import ptx_name
from ..native import calls
from ..selection import current_selection
from ..sharding.layout import Layout
from . import append_kv, checks, rms_norm, rotate
from .groups import ungrouped
from .op import KernelCall, Op


def rope_append(
    q: Any,
    k: Any,
    v: Any,
    k_pages: Any,
    v_pages: Any,
    slot_mapping: Any,
    cos: Any,
    sin: Any,
    *,
    interleaved: bool,
    q_norm: Any = None,
    k_norm: Any = None,
    eps: float | None = None,
    k_scales: Any = None,
    v_scales: Any = None,
    return_keys: bool = False,
) -> tuple[jax.Array, ...]:
    """Rotates q and k by their tokens' angles, and writes k and v into the pages.

    The pages are written as by `append_kv`. The first rope_dim dimensions of every head rotate in
    pairs: dimensions (2i, 2i + 1) if `interleaved` (GPT-J, llama files), otherwise
    (i, i + rope_dim / 2) (NEOX, Qwen), by angle i of the token (https://arxiv.org/abs/2104.09864).
    Angles are passed as cosines and sines, which all layers of a step share.

    Args:
      q: (tokens, num_heads, head_dim) float32, bfloat16 or float16.
      k, v: (tokens, num_kv_heads, head_dim) of these dtypes.
      k_pages, v_pages, slot_mapping, k_scales, v_scales: see `append_kv`.
      cos, sin: (tokens, rope_dim / 2) of these dtypes, rope_dim at most head_dim.
      q_norm, k_norm: (head_dim,), weights of an `rms_norm` with `eps` of every head of q and k
        before the rotation (Qwen 3); None means no norm. Both or neither.
      return_keys: whether to return the rotated k, too; the pages may hold it rounded.

    Returns:
      The rotated q of q's dtype, then the updated k_pages and v_pages and, for int8, k_scales and
      v_scales; with return_keys, last the rotated k of k's dtype.

    Raises:
      TypeError, ValueError: dtypes or shapes that don't fit; outside a traced program also a slot
        beyond the last page.
      NotImplementedError: under differentiation; there is no derivative.
    """
    given = checks.pages(k_pages, v_pages, k_scales, v_scales)
    pages = tuple(array for array in given if array is not None)
    of_keys = checks.float_array("k", k).dtype
    (k, v), slot_mapping = checks.new_tokens({"k": k, "v": v}, slot_mapping, pages[0])
    tokens, _, head_dim = k.shape
    q = checks.query(q, "tokens", tokens, head_dim)
    dtype, q = q.dtype, q.astype(jnp.float32)
    cos, sin = checked_angles(cos, sin, tokens, head_dim)
    interleaved = checks.flag("interleaved", interleaved)
    norms = checked_norms(q_norm, k_norm, head_dim)
    eps = checks.epsilon("eps", eps) if norms else 0.0
    if tokens == 0:
        return q.astype(dtype), *pages, *([k.astype(of_keys)] * return_keys)
    if current_selection().fuses("rope_append"):
        append_kv.check_slots(slot_mapping, pages[0])
        params = {"interleaved": interleaved, "eps": eps, "keys": return_keys}
        results = op.bind(pages, (q, k, v), slot_mapping, (cos, sin), norms, **params)
        count = len(pages)
        keys = [x.astype(of_keys) for x in results[count + 1 :]]
        return results[count].astype(dtype), *results[:count], *keys
    if norms:
        q, k = (
            rms_norm.rms_norm(x, weight, eps=eps) for x, weight in zip((q, k), norms, strict=True)
        )
    q, k = (rotate.rotate(x, cos, sin, interleaved=interleaved) for x in (q, k))
    k_pages, v_pages, k_scales, v_scales = given
    updated = append_kv.append_kv(
        k_pages, v_pages, k, v, slot_mapping, k_scales=k_scales, v_scales=v_scales
    )
    return q.astype(dtype), *updated, *([k.astype(of_keys)] * return_keys)


def checked_angles(cos: Any, sin: Any, tokens: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Checks the angles' cosines and sines; returns float32 (tokens, rope_dim / 2)."""
    cos, sin = (checks.float_array(name, x) for name, x in (("cos", cos), ("sin", sin)))
    if cos.ndim != 2 or cos.shape[0] != tokens or not 0 < 2 * cos.shape[1] <= head_dim:
        raise ValueError(
            f"cos has shape {cos.shape}; it must be (tokens={tokens}, "
            f"rope_dim / 2 <= {head_dim // 2})"
        )
    checks.same_shape("sin", sin, cos.shape, "cos's shape")
    return cos.astype(jnp.float32), sin.astype(jnp.float32)


def checked_norms(q_norm: Any, k_norm: Any, head_dim: int) -> tuple[jax.Array, ...]:
    """Checks the norm weights of queries and keys; returns float32 (head_dim,) of each, or ()."""
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must both be given, or neither")
    if q_norm is None:
        return ()
    return tuple(
        checks.float32(name, x, (head_dim,), "(head_dim,)")
        for name, x in (("q_norm", q_norm), ("k_norm", k_norm))
    )


#: k_pages, v_pages and, for int8, their scales.
Pages = tuple[jax.Array, ...]
#: q, k and v: float32 (tokens, heads, head_dim).
Rows = tuple[jax.Array, jax.Array, jax.Array]
#: Cosines and sines: float32 (tokens, rope_dim / 2).
Angles = tuple[jax.Array, jax.Array]


def reference(
    pages: Pages,
    rows: Rows,
    slot_mapping: jax.Array,
    angles: Angles,
    norms: tuple[jax.Array, ...],
    *,
    interleaved: bool,
    eps: float,
    keys: bool = False,
) -> tuple[jax.Array, ...]:
    """`rope_append` in plain JAX; returns the updated pages, the rotated q and, with `keys`, k."""
    q, k, v = rows
    if norms:
        q, k = (
            rms_norm.reference(x, weight, eps=eps) for x, weight in zip((q, k), norms, strict=True)
        )
    q, k = (rotate.reference(x, *angles, interleaved=interleaved) for x in (q, k))
    return *append_kv.reference(pages, (k, v), slot_mapping), q, *([k] * keys)


def ptx(
    launch: KernelCall,
    pages: Pages,
    rows: Rows,
    slot_mapping: jax.Array,
    angles: Angles,
    norms: tuple[jax.Array, ...],
    *,
    interleaved: bool,
    eps: float,
    keys: bool = False,
) -> list[jax.Array]:
    """`rope_append` by a PTX kernel."""
    from ptx_kernels.kernels.rope_append import rope_append as rope_kernel

    num_pages, num_kv_heads, page_size, head_dim = pages[0].shape
    slot_mapping = ungrouped(slot_mapping, 1, num_pages * page_size)
    kernel = rope_kernel(
        tokens=rows[0].shape[0],
        num_heads=rows[0].shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_dim=2 * angles[0].shape[1],
        num_pages=num_pages,
        page_size=page_size,
        dtype=ptx_name(pages[0].dtype),
        interleaved=interleaved,
        qk_norm=bool(norms),
        eps=eps,
        keys=keys,
    )
    return launch(kernel, *pages, *rows, slot_mapping, *angles, *norms)


def native(
    pages: Pages,
    rows: Rows,
    slot_mapping: jax.Array,
    angles: Angles,
    norms: tuple[jax.Array, ...],
    *,
    interleaved: bool,
    eps: float,
    keys: bool = False,
) -> list[jax.Array]:
    """`rope_append` by the native kernels, in place."""
    slot_mapping = ungrouped(slot_mapping, 1, pages[0].shape[0] * pages[0].shape[2])
    arrays = *rows, slot_mapping, *angles, *norms
    return calls.rope_append(pages, arrays, rope=True, interleaved=interleaved, eps=eps, keys=keys)


def _shapes(pages: Pages, rows: Rows, *_: Any, keys: bool = False, **__: Any) -> Any:
    return *pages, *rows[: 1 + keys]


def _layout(
    pages: Pages, _: Rows, slot_mapping: Any, *__: Any, keys: bool = False, **___: Any
) -> Layout:
    of_pages, rows, slots = append_kv.layout_names(slot_mapping)
    operands = (of_pages, rows, slots, slots, "_")
    return Layout(operands, (*[of_pages] * len(pages), *[rows] * (1 + keys)))


op = Op(
    "rope_append",
    reference,
    shapes=_shapes,
    ptx=ptx,
    native=native,
    layout=_layout,
    # q and k; unused slots of pages, an even number of arrays, may hold anything
    computed=lambda results: results[-2 + len(results) % 2 :],
)
