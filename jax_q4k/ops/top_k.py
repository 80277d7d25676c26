"""Argmax and top-k along the last axis, such as the candidates of a sampling step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..native import calls
from ..sharding.layout import Layout, Parts, Rows
from . import checks
from .op import KernelCall, Op
from .vmaps import by_rows

if TYPE_CHECKING:
    from ptx_kernels.ptx import Kernel

#: Values float32 and their indices int32.
Pair = tuple[jax.Array, jax.Array]


def argmax(x: Any) -> jax.Array:
    """Returns the index of the largest value along the last axis.

    Ties go to the lowest index. The first NaN counts as the largest value.

    Args:
      x: (..., n) float32, bfloat16 or float16, n at least 1.

    Returns:
      (...) int32. Derivatives treat it as a constant, like that of `jnp.argmax`.

    Raises:
      TypeError: a dtype that is not listed. ValueError: an empty axis.
    """
    x, rows = _checked(x)
    if not x.size:
        return jnp.zeros(x.shape[:-1], jnp.int32)
    _, index = _argmax.bind(jax.lax.stop_gradient(rows.merge(x).astype(jnp.float32)))
    return rows.split(index)


def top_k(x: Any, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the k largest values along the last axis, descending, and their indices.

    Like `jax.lax.top_k`: ties are in the order of their indices; NaN counts as the largest, -0 as
    0. On CUDA the kernels take a k of up to 2048, or rows of up to 4096 values; XLA sorts others.

    Args:
      x: (..., n) float32, bfloat16 or float16.
      k: 1 to n.

    Returns:
      (..., k) of x's dtype, differentiable, and (..., k) int32.

    Raises:
      TypeError: a dtype that is not listed, a k that is not an integer. ValueError: an empty axis,
        a k out of range.
    """
    x, rows = _checked(x)
    *leading, n = x.shape
    k = checks.integer("k", k)
    if not 1 <= k <= n:
        raise ValueError(f"k={k} must be 1 to {n}, the values of a row")
    if not x.size:
        return jnp.zeros((*leading, k), x.dtype), jnp.zeros((*leading, k), jnp.int32)
    values, indices = _top_k.bind(rows.merge(x).astype(jnp.float32), count=k)
    return rows.split(values).astype(x.dtype), rows.split(indices)


def _checked(x: Any) -> tuple[jax.Array, Rows]:
    """Returns x as an array (..., n), and the Rows that merge and split its leading axes."""
    x = checks.float_array("x", x)
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"x has shape {x.shape}; its last axis must hold at least one value")
    return x, Rows.of(x)


def _argmax_reference(x: jax.Array) -> Pair:
    """Returns the largest values of float32 (m, n), and their indices, in plain JAX.

    First finds the part of a row that has the maximum: a CPU finds a maximum with vector
    instructions, but its index one value at a time. Compares integers in the order of the values,
    because XLA's maximum of floats ignores NaN on a CPU.
    """
    m, n = x.shape
    size = math.gcd(n, 512)
    parts = order_keys(x).reshape(m, n // size, size)
    best = jnp.argmax(jnp.max(parts, axis=2), axis=1)[:, None]
    part = jnp.take_along_axis(parts, best[..., None], axis=1)[:, 0]
    at = jnp.argmax(part, axis=1)[:, None]
    indices = (best * size + at).astype(jnp.int32)
    return jnp.take_along_axis(x, indices, axis=1)[:, 0], indices[:, 0]


def order_keys(x: jax.Array) -> jax.Array:
    """Returns int32 in the order of float32 x: both zeros are equal, NaN is the largest."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    keys = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return jnp.where(jnp.isnan(x), jnp.iinfo(jnp.int32).max, keys)


def _top_k_reference(x: jax.Array, *, count: int) -> Pair:
    """`top_k` of float32 (m, n) in plain JAX."""
    # XLA orders by sign first, so all NaN and both zeros are made equal.
    x = jnp.where(jnp.isnan(x), jnp.nan, jnp.where(x == 0, 0.0, x))
    values, indices = jax.lax.top_k(x, count)
    # Without barriers, XLA sorts whole rows if a caller takes a slice. It aborts on one barrier for
    # both arrays if rows are split over devices.
    return jax.lax.optimization_barrier(values), jax.lax.optimization_barrier(indices)


def _top_k_derivative(x: jax.Array, *, count: int) -> Pair:
    """`top_k` as a differentiable gather of the values by their indices, which are constants."""
    _, indices = _top_k.bind(jax.lax.stop_gradient(x), count=count)
    return jnp.take_along_axis(x, indices, axis=1), indices


def _argmax_ptx(launch: KernelCall, x: jax.Array) -> Pair:
    from ptx_kernels.kernels.argmax import argmax as argmax_kernel
    from ptx_kernels.kernels.argmax import argmax_splits_rule
    from ptx_kernels.tuning import choose

    values, indices = _search(
        launch, x, argmax_kernel, functools.partial(choose, argmax_splits_rule)
    )
    return values[:, 0], indices[:, 0]


def _top_k_ptx(launch: KernelCall, x: jax.Array, *, count: int) -> Pair:
    from ptx_kernels.kernels.top_k import MAX_PART, MOST_OF_PARTS, top_k_splits_rule
    from ptx_kernels.kernels.top_k import top_k as top_k_kernel
    from ptx_kernels.tuning import choose

    if count > (MAX_PART if x.shape[1] <= MAX_PART else MOST_OF_PARTS):
        return _top_k_reference(x, count=count)

    def splits(columns: int) -> int:
        return choose(top_k_splits_rule, columns, count)

    return _search(launch, x, functools.partial(top_k_kernel, count=count), splits)


def _search(
    launch: KernelCall, x: jax.Array, build: Callable[..., Kernel], splits_of: Callable[[int], int]
) -> Pair:
    """Launches the search; returns the largest values and their indices, each (m, count).

    A launch finds the best of each part of a row; the next one searches these candidates, until
    there is one part.
    """
    found: tuple[jax.Array, ...] = (x,)
    splits = 0
    while splits != 1:
        rows, columns = found[0].shape
        splits, candidates = splits_of(columns), len(found) > 1
        kernel = build(rows=rows, columns=columns, splits=splits, from_candidates=candidates)
        found = tuple(launch(kernel, *found))
    return found[0], found[1]


def _pair(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)


def _argmax_split(parts: Parts, call: Any, x: jax.Array) -> Pair:
    """Returns the best of all devices' argmax; ties go to the first device, with lower indices."""
    values, indices = call(_argmax, x)
    values = parts.gather(values, "n")
    indices = parts.gather(indices + parts.index("n") * x.shape[1], "n")
    best = jnp.argmax(values, axis=0)[None]
    return jnp.take_along_axis(values, best, 0)[0], jnp.take_along_axis(indices, best, 0)[0]


def _top_k_split(parts: Parts, call: Any, x: jax.Array, *, count: int) -> Pair:
    """Returns the top k of all devices' top k; devices are in the order of their indices."""
    values, indices = call(_top_k, x, count=min(count, x.shape[1]))
    values = parts.gather(values, "n")
    indices = parts.gather(indices + parts.index("n") * x.shape[1], "n")
    values, indices = (jnp.moveaxis(a, 0, 1).reshape(x.shape[0], -1) for a in (values, indices))
    values, at = _top_k_reference(values, count=count)
    return values, jnp.take_along_axis(indices, at, 1)


_argmax = Op(
    "q4k_argmax",
    _argmax_reference,
    shapes=lambda x: _pair(x.shape[0]),
    ptx=_argmax_ptx,
    native=calls.argmax,
    vmap=by_rows,
    layout=lambda *_: Layout(("m n",), ("m", "m"), combined="n"),
    split=_argmax_split,
    computed=lambda _: (),
)
_top_k = Op(
    "q4k_top_k",
    _top_k_reference,
    shapes=lambda x, *, count: _pair(x.shape[0], count),
    ptx=_top_k_ptx,
    native=calls.top_k,
    vmap=by_rows,
    derivative=_top_k_derivative,
    layout=lambda *_, **__: Layout(("m n",), ("m", "m"), combined="n"),
    split=_top_k_split,
    computed=lambda _: (),
)
