"""Multiplies activations by the matrices of chosen experts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import QuantizedArray
from ..arrays.transposed import TransposedArray
from ..native import calls
from ..selection import activations_of
from ..sharding.layout import Layout, Parts, Rows
from . import checks, expert_kernels, grouped, quantize_q8_1
from .derivatives import Linear
from .op import KernelCall, Op
from .packed_matmul import INT8_COLUMNS, takes_q8_1
from .vmaps import by_examples, by_rows


def expert_matmul(x: Any, w: Any, ids: Any, *, activations: str | None = None) -> jax.Array:
    """y[..., j, :] = x @ dequantize(w[ids[..., j]]).T, accumulated in float32.

    An id outside 0..experts - 1 gives zeros; ids of experts on other devices are out of range. A
    NaN or Inf in a row of `x` reaches the results of that row only.

    Args:
      x: (..., k), shared by all experts of a token, or (..., top, k), a row for each; float32,
        bfloat16 or float16.
      w: QuantizedArray (experts, n, k), or a float array of one of these dtypes.
      ids: integers (..., top), at least one per token, such as the ids of `route`.
      activations: see `matmul`; its rows are tokens here.

    Returns:
      (..., top, n) of x's dtype. Differentiable in x, and in a float w, any number of times. A
      packed w is a constant; the rounding of `q8_1` has a straight-through gradient.

    Raises:
      TypeError: a dtype that is not listed. ValueError: shapes that don't fit, an unknown name.
    """
    x, activations = checks.float_array("x", x), activations_of(activations)
    w, ids = experts("w", w), expert_ids(ids)
    each = x.ndim == ids.ndim + 1  # x has a row for each expert of a token
    if (
        x.ndim not in (ids.ndim, ids.ndim + 1)
        or x.shape[: ids.ndim - 1 + each] != ids.shape[: ids.ndim - 1 + each]
    ):
        raise ValueError(
            f"x has shape {x.shape}; it must be (..., k) or (..., top, k) of ids {ids.shape}"
        )
    check_columns(x, "w", w)
    rows = Rows.of(ids)
    x, ids = rows.merge(x), rows.merge(ids)
    if not x.shape[0]:
        return rows.split(jnp.zeros((0, ids.shape[1], w.shape[1]), x.dtype))
    return rows.split(op.bind(x, ids, w, activations=activations))


def experts(name: str, w: Any) -> Any:
    """Returns `w` as a packed or float stack of matrices (experts, n, k)."""
    w = checks.value(w)
    packed = isinstance(w, (QuantizedArray, TransposedArray))
    checked = checks.quantized(name, w) if packed else checks.float_array(name, w)
    if checked.ndim != 3 or not all(checked.shape):
        rule = "it must have three axes (experts, n, k), none of them empty"
        raise ValueError(f"{name} has shape {checked.shape}; {rule}")
    return checked


def expert_ids(ids: Any) -> jax.Array:
    """Returns ids as int32 (..., top)."""
    checked = checks.int32_array("ids", ids)
    if checked.ndim < 1 or not checked.shape[-1]:
        raise ValueError(f"ids has shape {checked.shape}; it must be (..., top), top at least 1")
    return checked


def check_columns(x: jax.Array, name: str, w: Any) -> None:
    """Raises ValueError unless x is (..., k) and the matrices (experts, n, k)."""
    if x.shape[-1] != w.shape[2]:
        raise ValueError(
            f"x has shape {x.shape}; its last axis must be k={w.shape[2]}, as in {name} {w.shape}"
        )


def quantizes(weights: Any, tokens: Any, activations: str | None) -> bool:
    """Returns whether CUDA kernels may quantize so many tokens to q8_1 for these stacks."""
    return activations != "f32" and all(
        isinstance(w, QuantizedArray) and takes_q8_1(w.format, tokens, w.shape[2]) for w in weights
    )


def quantizes_natively(weights: Any, tokens: Any, activations: str | None) -> bool:
    """Like `packed_matmul.quantizes_natively`, for experts; float ones take floats."""
    packed = all(isinstance(w, QuantizedArray) for w in weights)
    if activations is None and packed and all(w.shape[2] % INT8_COLUMNS == 0 for w in weights):
        return True
    return quantizes(weights, tokens, activations)


def reference(x: jax.Array, ids: jax.Array, w: Any, *, activations: str | None) -> jax.Array:
    """`expert_matmul` in plain JAX, for x (m, k) or (m, top, k); `activations` None means f32."""
    m, top = ids.shape
    dtype, shared = x.dtype, top if x.ndim == 2 else 1
    x = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    if activations == "q8_1" and quantizes([w], m, activations):
        x = quantize_q8_1.rounded(x)
    blocks = grouped.blocks_of(ids.reshape(-1), w.shape[0])
    return grouped.product(x, w, blocks, shared=shared).reshape(m, top, -1).astype(dtype)


def ptx(
    launch: KernelCall, x: jax.Array, ids: jax.Array, w: Any, *, activations: str | None
) -> jax.Array:
    """`expert_matmul` by PTX kernels; `activations` None means q8_1."""
    m, top = ids.shape
    if not expert_kernels.takes([w], m, top):
        if expert_kernels.groups([w], activations):
            return expert_kernels.grouped(launch, x, ids, w).astype(x.dtype)
        return reference(x, ids, w, activations=activations)
    if x.ndim == 3:
        x, ids = x.reshape(m * top, -1), ids.reshape(m * top, 1)
    (y,) = expert_kernels.products(launch, x, ids, [w], activations=activations)
    return y.reshape(m, top, -1).astype(x.dtype)


def native(x: jax.Array, ids: jax.Array, w: Any, *, activations: str | None) -> jax.Array:
    """`expert_matmul` by the native kernels; `activations` None means q8_1."""
    quantized = quantizes_natively([w], ids.shape[0], activations)
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    return calls.expert_matmul(rows, ids, w, quantized=quantized).astype(x.dtype)


def local(parts: Parts, ids: jax.Array, w: Any) -> jax.Array:
    """Returns ids relative to this device's first expert, if the experts are split over devices."""
    return ids - parts.index("e") * w.shape[0] if parts.split("e") else ids


def _split(parts: Parts, call: Any, x: jax.Array, ids: jax.Array, w: Any, **params: Any) -> Any:
    """Multiplies by a device's experts, or its shard of k; sums over devices in float32."""
    y = call(op, x.astype(jnp.float32), local(parts, ids, w), w, **params)
    return parts.sum(parts.sum(y, "k"), "e").astype(x.dtype)


def _shapes(x: Any, ids: Any, w: Any, **_: Any) -> Any:
    return jax.ShapeDtypeStruct((*ids.shape, w.shape[1]), x.dtype)


def _layout(x: Any, *_: Any, **__: Any) -> Layout:
    return Layout(("m k" if x.ndim == 2 else "m _ k", "m _", "e n k"), "m _ n", combined="e k")


#: The primitive: linear in x (m, k) or (m, top, k), and in float weights.
op = Op(
    "expert_matmul",
    reference,
    shapes=_shapes,
    ptx=ptx,
    native=native,
    vmap=functools.partial(by_rows, operands=2, otherwise=by_examples),  # x and the ids
    derivative=Linear(tangent=lambda params: {**params, "activations": "f32"}),
    layout=_layout,
    split=_split,
)
