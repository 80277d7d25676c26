"""Computes QKV projections and rotary embeddings, and writes keys and values to the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..arrays.indexed import Packed, axes
from ..selection import activations_of, current_selection
from ..sharding.layout import Layout, Parts, Rows
from . import append_kv, checks, gemm, gemv, linear, linear_op, rms_norm, rope_append, rotate
from .groups import ungrouped
from .op import KernelCall, Op
from .prefetch import asking, prefetched

_COUNT = 3  # matrices: queries, keys, values


def qkv_rope_append(
    x: Any,
    weights: Sequence[Any],
    k_pages: Any,
    v_pages: Any,
    slot_mapping: Any,
    cos: Any,
    sin: Any,
    *,
    interleaved: bool,
    norm_weight: Any = None,
    eps: float | None = None,
    biases: Sequence[Any] | None = None,
    q_norm: Any = None,
    k_norm: Any = None,
    head_eps: float | None = None,
    k_scales: Any = None,
    v_scales: Any = None,
    prefetch: Sequence[Any] = (),
    activations: str | None = None,
) -> tuple[jax.Array, ...]:
    """Projects to queries, keys and values by `qkv_matmul`, then applies `rope_append` to heads.

    On CUDA, up to as many tokens as mat-vecs take run in one launch if heads are not normalized,
    pages have no scales, and complete heads rotate or pairs are adjacent dimensions.

    Args:
      x: (tokens, k) float32, bfloat16 or float16.
      weights: QuantizedArrays (num_heads * head_dim, k) and twice (num_kv_heads * head_dim, k),
        whose formats may differ, or float arrays.
      k_pages, v_pages, slot_mapping, k_scales, v_scales: see `append_kv`.
      cos, sin, interleaved, q_norm, k_norm: see `rope_append`; head_eps is its eps.
      norm_weight, eps, biases, activations: see `qkv_matmul`.
      prefetch: see `linear`.

    Returns:
      The rotated q (tokens, num_heads, head_dim) of x's dtype, then the updated k_pages and v_pages
      and, for int8, k_scales and v_scales.

    Raises:
      TypeError, ValueError: see `qkv_matmul` and `rope_append`; also rows that are not complete
        heads.
      NotImplementedError: under differentiation; there is no derivative.
    """
    x, activations = checks.float_array("x", x), activations_of(activations)
    given = checks.pages(k_pages, v_pages, k_scales, v_scales)
    pages = tuple(array for array in given if array is not None)
    named = {f"weights[{i}]": w for i, w in enumerate(weights)}
    weights = tuple(checks.weights(named, None).values())
    tokens = _check_rows(x, weights, pages[0])
    norm = {"norm_weight": norm_weight, "eps": eps, "biases": biases}
    fused = all(isinstance(w, Packed) for w in weights)
    if not (fused and tokens and current_selection().fuses("qkv_rope_append")):
        ys = linear.linear(x, weights, **norm, prefetch=prefetch, activations=activations)
        q, k, v = (_heads(y, pages[0]) for y in ys)
        options: Any = {
            "interleaved": interleaved,
            "q_norm": q_norm,
            "k_norm": k_norm,
            "eps": head_eps,
        }
        options |= {"k_scales": k_scales, "v_scales": v_scales}
        return rope_append.rope_append(q, k, v, k_pages, v_pages, slot_mapping, cos, sin, **options)
    head_dim = pages[0].shape[3]
    slot_mapping = checks.slots(slot_mapping, pages[0])
    if slot_mapping.size != tokens:
        raise ValueError(f"slot_mapping has {slot_mapping.size} slots; x has {tokens} tokens")
    append_kv.check_slots(slot_mapping, pages[0])
    norms = rope_append.checked_norms(q_norm, k_norm, head_dim)
    rows, norm_of_rows = x.astype(jnp.float32), None if norm_weight is None else (norm_weight, eps)
    operands = Operands(
        pages,
        linear.checked_operands(rows, Rows.of(rows), weights, norm_of_rows, biases, None),
        slot_mapping,
        rope_append.checked_angles(cos, sin, tokens, head_dim),
        norms,
    )
    *updated, q = op.bind(
        *operands,
        interleaved=checks.flag("interleaved", interleaved),
        eps=0.0 if norm_weight is None else checks.epsilon("eps", eps),
        head_eps=checks.epsilon("head_eps", head_eps) if norms else 0.0,
        prefetch=prefetched(prefetch),
        activations=activations,
    )
    return q.astype(x.dtype), *updated


def _check_rows(x: jax.Array, weights: Sequence[Any], k_pages: jax.Array) -> Any:
    """Raises ValueError unless the matrices project to heads that fit the pages.

    Returns the number of tokens, which may be symbolic.
    """
    if x.ndim != 2:
        raise ValueError(f"x has shape {x.shape}; it must be (tokens, k)")
    if len(weights) != _COUNT:
        raise ValueError(f"weights has {len(weights)} elements; it must have {_COUNT}: q, k, v")
    _, num_kv_heads, _, head_dim = k_pages.shape
    for i, w in enumerate(weights):
        linear.check_columns(x, f"weights[{i}]", w)
        whole = w.shape[0] % head_dim == 0 if i == 0 else w.shape[0] == num_kv_heads * head_dim
        if not whole or not w.shape[0]:
            of = "a multiple of head_dim" if i == 0 else "num_kv_heads * head_dim"
            raise ValueError(
                f"weights[{i}] has {w.shape[0]} rows; they must be {of}, of pages {k_pages.shape}"
            )
    return x.shape[0]


def _heads(rows: jax.Array, k_pages: jax.Array) -> jax.Array:
    """Reshapes (tokens, heads * head_dim) to (tokens, heads, head_dim), by the pages' head_dim."""
    head_dim = k_pages.shape[3]
    return rows.reshape(rows.shape[0], rows.shape[1] // head_dim, head_dim)


class Operands(NamedTuple):
    """The primitive's operands; angles, norms and `product`'s arrays except weights are float32."""

    pages: tuple[jax.Array, ...]  # k_pages, v_pages and, for int8, their scales
    product: linear_op.Operands
    slot_mapping: jax.Array  # int32 (tokens,), or (groups, tokens of a group)
    angles: rope_append.Angles
    norms: tuple[jax.Array, ...]  # (head_dim,) of q and k, or ()


def _chain(
    projected: Any, appended: Any, operands: Operands, *, interleaved: bool, head_eps: float
) -> Any:
    """Applies `appended`, an implementation of `rope_append`, to the projections q, k and v.

    Returns the updated pages and the rotated q.
    """
    pages, product, *others = operands
    heads = tuple(_heads(y, pages[0]) for y in projected)
    return appended(pages, heads, *others, interleaved=interleaved, eps=head_eps)


def _reference(
    *given: Any, interleaved: bool, eps: float, head_eps: float, activations: str | None
) -> Any:
    """The operation in plain JAX."""
    operands = Operands(*given)
    ys = linear_op.reference(*operands.product, eps=eps, activation=None, activations=activations)
    return _chain(ys, rope_append.reference, operands, interleaved=interleaved, head_eps=head_eps)


def _native(
    *given: Any, interleaved: bool, eps: float, head_eps: float, activations: str | None
) -> Any:
    """The operation by the native kernels; `activations` None means q8_1."""
    operands = Operands(*given)
    ys = linear_op.native(*operands.product, eps=eps, activations=activations)
    return _chain(ys, rope_append.native, operands, interleaved=interleaved, head_eps=head_eps)


def _ptx(
    launch: KernelCall,
    *given: Any,
    interleaved: bool,
    eps: float,
    head_eps: float,
    activations: str | None,
    prefetch: Sequence[Packed] = (),
) -> Any:
    """The operation by one PTX kernel, or by one kernel for each step."""
    from ptx_kernels.tuning import choose

    operands = Operands(*given)
    pages, product, slot_mapping, angles, norms = operands
    m, slots = product.x.shape[0], pages[0].shape[0] * pages[0].shape[2]
    heads = gemv.Heads(pages, ungrouped(slot_mapping, 1, slots), *angles, interleaved)
    asked = None
    if not norms and not gemm.takes(product.weights, m, activations):
        asked = gemv.append_rule(product.weights, m, heads, activations)
    if asked is None:
        ys = linear_op.ptx(launch, *product, eps=eps, activations=activations, prefetch=prefetch)

        def appended(*operands: Any, **options: Any) -> Any:
            return rope_append.ptx(launch, *operands, **options)

        return _chain(ys, appended, operands, interleaved=interleaved, head_eps=head_eps)
    around: Any = {"norm_weight": product.norm_weight, "eps": eps, "biases": product.biases}
    rule, shape = asked
    config = choose(rule, *shape)
    launch = asking(launch, prefetch, m)
    *updated, q = gemv.append(launch, product.x, product.weights, heads, config, **around)
    return *updated, _heads(q, pages[0])


def _shapes(*given: Any, **_: Any) -> Any:
    operands = Operands(*given)
    head_dim, product = operands.pages[0].shape[3], operands.product
    heads = product.weights[0].shape[0] // head_dim
    return *operands.pages, jax.ShapeDtypeStruct((product.x.shape[0], heads, head_dim), jnp.float32)


def _layout(*given: Any, **_: Any) -> Layout:
    """Returns the Layout; query heads may be split differently than key and value heads."""
    operands = Operands(*given)
    of_pages, rows, slots = append_kv.layout_names(operands.slot_mapping)
    token = rows.split()[0]
    names = "g", "h", "h"
    matrices = tuple(
        axes(w, f"{n} k") for w, n in zip(operands.product.weights, names, strict=True)
    )
    product = (f"{token} k", "_", "k", matrices, names)
    results = (*[of_pages] * len(operands.pages), f"{token} g _")
    return Layout((of_pages, product, slots, slots, "_"), results, combined="k g h")


def _split(
    parts: Parts,
    call: Any,
    *leaves: Any,
    interleaved: bool,
    eps: float,
    head_eps: float,
    activations: str | None,
) -> Any:
    """Runs one call if query heads are split like KV heads, else the operation step by step.

    The steps are the projections, `rope_append` of keys and values, and the rotation of queries.
    """
    operands = Operands(*leaves)
    pages, product, slot_mapping, angles, norms = operands
    if parts.alike("g", "h") and not parts.split("k"):
        options = {"eps": eps, "head_eps": head_eps, "activations": activations}
        return call(op, *operands, interleaved=interleaved, **options)
    of_rows = {f"n{i}": parts.axes.get(name, ()) for i, name in enumerate("ghh")}
    by_matrix = Parts({**of_rows, "k": parts.axes.get("k", ())})  # with `linear`'s names
    given: Any = {"eps": eps, "activation": None, "activations": activations}
    ys = linear_op.split(by_matrix, call, *product, **given)
    q, k, v = (_heads(y, pages[0]) for y in ys)
    options = {"interleaved": interleaved, "eps": head_eps}
    *updated, _ = call(rope_append.op, pages, (k, k, v), slot_mapping, angles, norms, **options)
    if norms:
        q = rms_norm.reference(q, norms[0], eps=head_eps)
    return *updated, rotate.reference(q, *angles, interleaved=interleaved)


op = Op(
    "qkv_rope_append",
    _reference,
    shapes=_shapes,
    ptx=_ptx,
    native=_native,
    layout=_layout,
    split=_split,
    computed=lambda results: results[-1:],  # q; unused slots of pages may hold anything
)
