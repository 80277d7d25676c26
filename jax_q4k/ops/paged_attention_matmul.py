"""Paged attention, fused with the output projection that follows it in a decoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

from ptx_kernels.limits import GROUP

from .. import float_types
from ..arrays import QuantizedArray
from ..arrays.indexed import Packed
from ..selection import activations_of, current_selection
from ..sharding.layout import Layout, Parts
from . import attend, checks, decoded, gemm, gemv, linear, linear_op
from .op import KernelCall, Op
from .paged_attention import checked_pages
from .prefetch import asking, prefetched


def paged_attention_matmul(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_tables: Any,
    context_lens: Any,
    w: Any,
    *,
    bias: Any = None,
    residual: Any = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    prefetch: Sequence[Any] = (),
    activations: str | None = None,
    lengths: Any = None,
    gate: Any = None,
) -> jax.Array:
    """residual + paged_attention(q, ...) @ dequantize(w).T + bias, heads concatenated, in float32.

    If the projection takes int8 or f16 activations that a separate kernel would convert, the
    attention kernel writes them directly.

    Args:
      q, k_pages, v_pages, block_tables, context_lens: see `paged_attention`.
      scale, window, soft_cap, sinks, k_scales, v_scales, lengths, gate: see `paged_attention`.
      w: QuantizedArray (n, num_heads * head_dim), or a float array.
      bias: (n,) or None. residual: (batch, n), with a time axis (batch, time, n), or None.
      prefetch: see `linear`; the launch of attention prefetches these, too.
      activations: see `matmul`.

    Returns:
      (batch, n), or (batch, time, n), of q's dtype.

    Raises:
      TypeError, ValueError: see `paged_attention` and `matmul`.
      NotImplementedError: under differentiation; there is no derivative.
    """
    activations = activations_of(activations)
    v_pages = checks.float_array("v_pages", v_pages, float_types.PAGE_DTYPES)
    of_rows = block_tables, context_lens, lengths
    pages = k_pages, v_pages, k_scales, v_scales
    operands = attend.Operands(q, *pages, *of_rows, sinks, gate=gate)
    given, params = checked_pages(operands, scale=scale, window=window, soft_cap=soft_cap)
    dtype, given = given.q.dtype, given.computed_in_float32()
    w = checks.weight("w", w)
    *rows, num_heads, head_dim = given.q.shape
    n, k = w.shape
    if k != num_heads * head_dim:
        raise ValueError(
            f"w has shape {w.shape}; its k must be num_heads * head_dim, {num_heads} * {head_dim}"
        )
    if not (
        0 not in rows
        and n
        and isinstance(w, QuantizedArray)
        and current_selection().fuses("paged_attention_matmul")
    ):
        out = attend.attend(given, params).reshape(*rows, k)
        (y,) = linear.linear(
            out,
            (w,),
            biases=(bias,),
            residual=residual,
            prefetch=prefetch,
            activations=activations,
        )
        return y.astype(dtype)
    if bias is not None:
        bias = checks.float32("bias", bias, (n,), "(n,)")
    if residual is not None:
        rule = "(batch, n)" if len(rows) == 1 else "(batch, time, n)"
        residual = checks.float32("residual", residual, (*rows, n), rule)
    ahead = prefetched(prefetch)
    y = _op.bind(given, w, bias, residual, prefetch=ahead, activations=activations, **params)
    return y.astype(dtype)


def _product(
    out: jax.Array, w: Any, bias: jax.Array | None, residual: jax.Array | None
) -> linear_op.Operands:
    """Returns the output projection's operands, for attention's result `out`.

    `out` is (..., num_heads, head_dim).
    """
    x = out.reshape(-1, out.shape[-2] * out.shape[-1])
    return linear_op.Operands(x, _flat(residual), None, (w,), (bias,))


def _flat(residual: jax.Array | None) -> jax.Array | None:
    """Reshapes (..., n) to (rows, n)."""
    return None if residual is None else residual.reshape(-1, residual.shape[-1])


def _as_queries(given: attend.Operands, y: jax.Array) -> jax.Array:
    """Reshapes (rows, n) to (batch, n), or (batch, time, n)."""
    return y.reshape(*given.q.shape[:-2], y.shape[-1])


def _reference(
    given: attend.Operands, *others: Any, activations: str | None, **params: Any
) -> jax.Array:
    """The operation in plain JAX."""
    product = _product(attend.reference(*given, **params), *others)
    (y,) = linear_op.chain(product, 0.0, None, linear_op.reference_steps(activations))
    return _as_queries(given, y)


def _ptx(
    launch: KernelCall,
    given: attend.Operands,
    w: QuantizedArray,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activations: str | None,
    prefetch: Sequence[Packed] = (),
    **params: Any,
) -> jax.Array:
    """The operation by PTX kernels; `activations` None selects the fastest format."""
    m, head_dim = math.prod(given.q.shape[:-2]), given.q.shape[-1]
    launch = asking(launch, prefetch, m)
    options: dict[str, Any] = {"biases": [bias], "residual": _flat(residual)}
    quantized = head_dim % GROUP == 0 and not decoded.takes([w], m, activations)
    if quantized and gemm.takes_quantized(w, m, activations):
        output = gemm.quantized_to([w], m, activations)
        rows = attend.launches(launch, given, **params, output=output)
        return _as_queries(given, gemm.gemm(launch, rows, [w], **options)[0])
    if quantized and gemv.quantized_ahead(w, m, activations):
        rows = attend.launches(launch, given, **params, output="q8_1")
        return _as_queries(given, gemv.gemv(launch, rows, [w], **options)[0])
    product = _product(attend.ptx(launch, *given, **params), w, bias, residual)
    return _as_queries(given, linear_op.ptx(launch, *product, activations=activations)[0])


def _native(
    given: attend.Operands, *others: Any, activations: str | None, **params: Any
) -> jax.Array:
    """The operation by the native kernels; `activations` None means q8_1."""
    product = _product(attend.native(*given, **params), *others)
    return _as_queries(given, linear_op.native(*product, activations=activations)[0])


def _shapes(given: attend.Operands, w: Any, *_: Any, **__: Any) -> Any:
    return jax.ShapeDtypeStruct((*given.q.shape[:-2], w.shape[0]), given.q.dtype)


def _layout(given: attend.Operands, *_: Any, **__: Any) -> Layout:
    """Returns the Layout; the heads' axis is h in attention, and g in the columns of `w`.

    The names differ, as a shard boundary of h may cut quantization blocks of `w`.
    """
    of_attention = attend.layout(*given)
    y = "b n" if given.lengths is None else "b _ n"
    return Layout((of_attention.operands, "n g", "n", y), y, combined="h g")


def _split(
    parts: Parts,
    call: Any,
    given: attend.Operands,
    w: Any,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activations: str | None,
    **params: Any,
) -> jax.Array:
    """Runs a device's heads; adds bias and residual after the sum over devices."""
    if parts.alike("h", "g"):
        y = call(_op, given, w, None, None, activations=activations, **params)
        return linear_op.plus(parts.sum(y, "g"), bias, residual)
    out = call(attend.op, *given, **params)
    out = parts.along(out.reshape(-1, out.shape[-2] * out.shape[-1]), "h", "g")
    product = linear_op.Operands(out, None, None, (w,), (None,))
    (y,) = call(linear_op.op, *product, eps=0.0, activation=None, activations=activations)
    return linear_op.plus(_as_queries(given, parts.sum(y, "g")), bias, residual)


_op = Op(
    "paged_attention_matmul",
    _reference,
    shapes=_shapes,
    ptx=_ptx,
    native=_native,
    layout=_layout,
    split=_split,
)
