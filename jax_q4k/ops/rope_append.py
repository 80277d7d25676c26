"""Applies rotary embeddings to queries and keys, and writes keys and values to the KV cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ptx_kernels.limits import LATENT_DIMS

from ..custom_call import ptx_name
from ..native import calls
from ..selection import current_selection
from ..sharding.layout import Layout, Parts
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
    v_eps: float | None = None,
    k_scales: Any = None,
    v_scales: Any = None,
    q_rest: int = 0,
    return_keys: bool = False,
) -> tuple[jax.Array, ...]:
    """Rotates q and k by their tokens' angles, and writes k and v into the pages.

    The pages are written as by `append_kv`. The first rope_dim dimensions of every head rotate in
    pairs: dimensions (2i, 2i + 1) if `interleaved` (GPT-J, llama files), otherwise
    (i, i + rope_dim / 2) (NEOX, Qwen), by angle i of the token (https://arxiv.org/abs/2104.09864).
    Angles are passed as cosines and sines, which all layers of a step share.

    Latent pages (MLA) have no v and no v_pages; both are None. A row of k is a latent vector
    followed by a key of rope_dim dimensions, which rotates, and only the latent vector is
    normalized. Queries are rope_dim wide.

    Args:
      q: (tokens, num_heads, head_dim) float32, bfloat16 or float16; with q_rest, its rows are
        longer by as many elements.
      k, v: (tokens, num_kv_heads, head_dim) of these dtypes.
      k_pages, v_pages, slot_mapping, k_scales, v_scales: see `append_kv`.
      cos, sin: (tokens, rope_dim / 2) of these dtypes, rope_dim at most head_dim.
      q_norm, k_norm: (head_dim,), weights of an `rms_norm` with `eps` of every head of q and k
        before the rotation (Qwen 3); None means no norm. Both or neither. For latent pages only
        k_norm, (head_dim - rope_dim,).
      v_eps: eps of an `rms_norm` of every head of v without weights (Gemma 4); None means no norm.
      q_rest: elements of a row of q that are not the query: those after it (an output gate), or for
        latent pages those before it.
      return_keys: whether to return the rotated k, too; the pages may hold it rounded. Not for
        latent pages.

    Returns:
      The rotated q of q's dtype, with q_rest then the rest of q's rows, then the updated k_pages
      and v_pages and, for int8, k_scales and v_scales; with return_keys, last the rotated k of k's
      dtype.

    Raises:
      TypeError, ValueError: dtypes or shapes that don't fit; outside a traced program also a slot
        beyond the last page.
      NotImplementedError: under differentiation; there is no derivative.
    """
    latent = v_pages is None
    if latent and not (v is None and v_eps is None and q_norm is None and not return_keys):
        raise TypeError("v, v_eps, q_norm and return_keys belong to v_pages, which is None")
    given = (
        checks.latent_pages(k_pages, k_scales, v_scales)
        if latent
        else checks.pages(k_pages, v_pages, k_scales, v_scales)
    )
    pages = tuple(array for array in given if array is not None)
    of_keys = checks.float_array("k", k).dtype
    new = {"k": k} if latent else {"k": k, "v": v}
    kv_rows, slot_mapping = checks.new_tokens(new, slot_mapping, pages[0])
    tokens, _, head_dim = kv_rows[0].shape
    cos, sin = checked_angles(cos, sin, tokens, head_dim)
    q_rest = checks.count("q_rest", q_rest)
    q_dim = _latent_query_dim(cos, head_dim) if latent else head_dim
    q = checks.query(q, "tokens", tokens, q_dim + q_rest)
    dtype, rows = q.dtype, (q.astype(jnp.float32), *kv_rows)
    interleaved = checks.flag("interleaved", interleaved)
    norms: tuple[jax.Array, ...]
    if latent:
        rank, rule = (head_dim - q_dim,), "(head_dim - rope_dim,)"
        norms = () if k_norm is None else (checks.float32("k_norm", k_norm, rank, rule),)
    else:
        norms = checked_norms(q_norm, k_norm, head_dim)
    eps = checks.epsilon("eps", eps) if norms else 0.0
    v_eps = None if v_eps is None else checks.epsilon("v_eps", v_eps)
    angles = cos, sin
    options: Any = {"interleaved": interleaved, "eps": eps, "q_rest": q_rest, "v_eps": v_eps}
    if tokens == 0 or not current_selection().fuses("rope_append"):
        by: Any = {"norm": rms_norm.rms_norm, "rotate": rotate.rotate}
        rotated, kv_rows = _rotated(rows, angles, norms, **by, **options)
        of_pages = dict(zip(("k_pages", "v_pages", "k_scales", "v_scales"), given, strict=True))
        of_rows = dict(zip("kv", (*kv_rows, None), strict=False))
        updated = append_kv.append_kv(**of_pages, **of_rows, slot_mapping=slot_mapping)
        keys = kv_rows[:return_keys]
    else:
        append_kv.check_slots(slot_mapping, pages[0])
        results = op.bind(pages, rows, slot_mapping, angles, norms, keys=return_keys, **options)
        count = len(pages)
        updated, rotated = results[:count], results[count : count + 1 + bool(q_rest)]
        keys = results[len(results) - return_keys :]
    of_queries = [x.astype(dtype) for x in rotated]
    return *of_queries, *updated, *[x.astype(of_keys) for x in keys]


def _latent_query_dim(cos: jax.Array, head_dim: int) -> int:
    """Returns rope_dim, the width of a query for latent pages with rows of `head_dim`."""
    rope_dim = 2 * cos.shape[1]
    if rope_dim % LATENT_DIMS[0] or rope_dim >= head_dim:
        raise ValueError(
            f"rope_dim={rope_dim} must be a multiple of {LATENT_DIMS[0]} below the head_dim="
            f"{head_dim} of latent pages"
        )
    return rope_dim


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


#: k_pages, v_pages and, for int8, their scales; latent pages lack those of v.
Pages = tuple[jax.Array, ...]
#: q, k and v: float32 (tokens, heads, head_dim); no v for latent pages.
Rows = tuple[jax.Array, ...]
#: Cosines and sines: float32 (tokens, rope_dim / 2).
Angles = tuple[jax.Array, jax.Array]


def _rotated(
    rows: Rows,
    angles: Angles,
    norms: tuple[jax.Array, ...],
    *,
    norm: Callable[..., jax.Array] = rms_norm.reference,
    rotate: Callable[..., jax.Array] = rotate.reference,
    interleaved: bool,
    eps: float,
    q_rest: int,
    v_eps: float | None = None,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Normalizes and rotates queries and keys by `norm` (x, weight, eps=) and `rotate`.

    Returns [q], with `q_rest` [q, the rest of its rows], and the rows to store: [k, v] or [k].
    """

    def turn(x: jax.Array) -> jax.Array:
        return rotate(x, *angles, interleaved=interleaved)

    rows, norm = _normal_values(rows, v_eps, norm), functools.partial(norm, eps=eps)
    q, k, *v = rows
    if v:
        q, rest = q[..., : k.shape[-1]], q[..., k.shape[-1] :]
        q, k = map(norm, (q, k), norms) if norms else (q, k)
        q, k = turn(q), turn(k)
    else:
        rank = k.shape[-1] - 2 * angles[0].shape[1]
        q, rest = q[..., q_rest:], q[..., :q_rest]
        vector = norm(k[..., :rank], *norms) if norms else k[..., :rank]
        q, k = turn(q), jnp.concatenate([vector, turn(k[..., rank:])], axis=-1)
    return [q, rest][: 1 + bool(q_rest)], [k, *v]


def _normal_values(rows: Rows, v_eps: float | None, norm: Callable[..., jax.Array]) -> Rows:
    """Applies `norm` (x, weight, eps=) with weights of 1 to v, unless `v_eps` is None."""
    if v_eps is None:
        return rows
    q, k, v = rows
    return q, k, norm(v, jnp.ones(v.shape[-1]), eps=v_eps)


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
    q_rest: int = 0,
    v_eps: float | None = None,
) -> tuple[jax.Array, ...]:
    """`rope_append` in plain JAX; returns the updated pages, the rotated q, its rest, and k."""
    options: Any = {"interleaved": interleaved, "eps": eps, "q_rest": q_rest, "v_eps": v_eps}
    queries, new = _rotated(rows, angles, norms, **options)
    return *append_kv.reference(pages, tuple(new), slot_mapping), *queries, *new[:keys]


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
    q_rest: int = 0,
    v_eps: float | None = None,
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
        v_eps=v_eps,
        keys=keys,
        latent=len(rows) == 2,
        q_rest=q_rest,
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
    q_rest: int = 0,
    v_eps: float | None = None,
) -> list[jax.Array]:
    """`rope_append` by the native kernels, in place; XLA normalizes latent vectors and values."""
    slot_mapping = ungrouped(slot_mapping, 1, pages[0].shape[0] * pages[0].shape[2])
    if len(rows) == 2:
        options: Any = {"interleaved": interleaved, "eps": eps, "q_rest": q_rest}
        queries, new = _rotated(rows, angles, norms, rotate=calls.rotate, **options)
        updated = calls.rope_append(pages, (*new, slot_mapping), rope=False, latent=True)
        return [*updated, *queries]
    q, *kv_rows = _normal_values(rows, v_eps, rms_norm.reference)
    head_dim, count = kv_rows[0].shape[-1], len(pages)
    arrays = q[..., :head_dim], *kv_rows, slot_mapping, *angles, *norms
    results = calls.rope_append(
        pages, arrays, rope=True, interleaved=interleaved, eps=eps, keys=keys
    )
    rest = [q[..., head_dim:]] if q_rest else []
    return [*results[: count + 1], *rest, *results[count + 1 :]]


def _shapes(
    pages: Pages,
    rows: Rows,
    _: Any,
    angles: Angles,
    *__: Any,
    keys: bool = False,
    q_rest: int = 0,
    **___: Any,
) -> Any:
    q, k, *v = rows
    q_dim = k.shape[-1] if v else 2 * angles[0].shape[-1]
    widths = (q_dim, q_rest) if q_rest else (q_dim,)
    queries = [jax.ShapeDtypeStruct((*q.shape[:-1], n), q.dtype) for n in widths]
    return *pages, *queries, *[k][:keys]


def _layout(
    pages: Pages,
    given: Rows,
    slot_mapping: Any,
    *_: Any,
    keys: bool = False,
    q_rest: int = 0,
    **__: Any,
) -> Layout:
    """Returns the Layout; devices with different query heads have the same single latent row."""
    of_pages, rows, slots = append_kv.layout_names(slot_mapping)
    of_keys, combined = rows, ""
    if len(given) == 2 and pages[0].shape[1] == 1:
        of_pages, of_keys = of_pages.replace("h", "_"), rows.replace("h", "_")
        combined = "h"
    operands = (of_pages, (rows, *[of_keys] * (len(given) - 1)), slots, slots, "_")
    of_queries = [rows] * (1 + bool(q_rest))
    results = (*[of_pages] * len(pages), *of_queries, *[of_keys] * keys)
    return Layout(operands, results, combined)


def _split(
    _: Parts,
    call: Any,
    pages: Pages,
    rows: Rows,
    slot_mapping: jax.Array,
    angles: Angles,
    norms: tuple[jax.Array, ...],
    *,
    keys: bool,
    **options: Any,
) -> Any:
    """Rotates a device's query heads, and apart from them stores latent rows, as all devices do."""
    del keys  # not of latent pages
    queries, new = _rotated(rows, angles, norms, **options)
    return *call(append_kv.op, pages, tuple(new), slot_mapping), *queries


def _computed(results: Sequence[Any]) -> Sequence[Any]:
    """Returns queries and k; unused slots of pages, and their scales, may hold anything."""
    pages = sum(x.ndim == 4 for x in results)
    return results[pages * (2 if results[0].dtype == jnp.int8 else 1) :]


op = Op(
    "rope_append",
    reference,
    shapes=_shapes,
    ptx=ptx,
    native=native,
    layout=_layout,
    split=_split,
    computed=_computed,
)
