"""Embedding lookup that decodes rows of a packed table."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ptx_kernels import formats

from ..arrays import QuantizedArray
from ..custom_call import ptx_name
from ..native import calls
from ..sharding.layout import Layout, Parts, Rows
from . import checks
from .derivatives import Linear
from .op import KernelCall, Op
from .vmaps import by_reference


def embedding(ids: Any, w: Any, dtype: Any = jnp.float32) -> jax.Array:
    """Returns rows `ids` of `w` as floats; decodes only those rows.

    An id outside 0..vocab-1 gives a row of NaN, and an error under `checkify.index_checks`.

    Args:
      ids: (...,) integers.
      w: QuantizedArray (vocab, k), or a float array (vocab, k). Differentiable in a float array.
      dtype: float32, bfloat16 or float16.

    Returns:
      (..., k) of `dtype`.

    Raises:
      TypeError: ids that are not integers, or a dtype that is not listed. ValueError: `w` does not
        have two axes.
    """
    ids = checks.int32_array("ids", ids)
    dtype = checks.float_dtype("dtype", dtype)
    w = checks.value(w)
    quantized = isinstance(w, QuantizedArray)
    w = checks.matrix("w", w) if quantized else checks.float_array("w", w)
    if w.ndim != 2:
        raise ValueError(f"w has shape {w.shape}; it must have two axes (vocab, k)")
    vocab, k = w.shape
    if math.prod(ids.shape) == 0 or vocab == 0:
        return jnp.full((*ids.shape, k), jnp.nan, dtype)
    op, rows = _op if quantized else _float_op, Rows.of(ids, dims=0)
    return rows.split(op.bind(rows.merge(ids), w, dtype=dtype))


def reference(ids: jax.Array, w: QuantizedArray, *, dtype: Any) -> jax.Array:
    """`embedding` of ids (count,) in plain JAX."""
    vocab, block = w.shape[0], formats.get(w.format)
    inside = jnp.clip(ids, 0, vocab - 1)
    if isinstance(ids.shape[0], int):
        rows = block.decode(tuple(plane[inside] for plane in w.planes), jnp)
    else:  # XLA cannot bitcast a symbolic number of rows
        rows = block.decode(w.planes, jnp)[inside]
    return _nan_outside(ids, vocab, rows.astype(dtype))


def ptx(launch: KernelCall, ids: jax.Array, w: QuantizedArray, *, dtype: Any) -> jax.Array:
    """`embedding` of ids (count,) by a PTX kernel."""
    from ptx_kernels.kernels.decode import decode

    n, blocks, _ = w.planes[0].shape
    dtype = ptx_name(dtype)
    kernel = decode(format=w.format, n=n, blocks=blocks, dtype=dtype, lookups=ids.shape[0])
    (rows,) = launch(kernel, *w.planes, ids)
    return rows


def native(ids: jax.Array, w: Any, *, dtype: Any) -> jax.Array:
    """`embedding` of ids (count,) by the native kernels.

    XLA's gather of bfloat16 would make a float32 copy of a float table.
    """
    return calls.embedding(ids, w).astype(dtype)


def _float_reference(ids: jax.Array, w: jax.Array, *, dtype: Any) -> jax.Array:
    """`embedding` of ids (count,) and float rows in plain JAX."""
    vocab = w.shape[0]
    return _nan_outside(ids, vocab, w[jnp.clip(ids, 0, vocab - 1)].astype(dtype))


def _nan_outside(ids: jax.Array, vocab: int, rows: jax.Array) -> jax.Array:
    inside = (ids >= 0) & (ids < vocab)
    return jnp.where(inside[:, None], rows, jnp.nan)


def _shapes(ids: Any, w: Any, *, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct((ids.shape[0], w.shape[1]), dtype)


def _indices(ids: jax.Array, w: Any, **_: Any) -> tuple[jax.Array, tuple[int, ...]]:
    return ids, w.shape


def _layout(*_: Any, **__: Any) -> Layout:
    return Layout(("t", "v k"), "t k", combined="v")


def _split(parts: Parts, call: Any, ids: jax.Array, w: Any, *, dtype: Any) -> jax.Array:
    """Looks up the ids in each device's shard of the table's rows, and sums over devices."""
    op = _op if isinstance(w, QuantizedArray) else _float_op
    local_vocab, vocab = w.shape[0], w.shape[0] * parts.count("v")
    local = ids - parts.index("v") * local_vocab
    mine = (local >= 0) & (local < local_vocab)
    rows = call(op, jnp.where(mine, local, 0), w, dtype=dtype)
    rows = parts.sum(jnp.where(mine[:, None], rows, jnp.zeros((), dtype)), "v")
    return _nan_outside(ids, vocab, rows)


_op = Op(
    "packed_embedding",
    reference,
    shapes=_shapes,
    ptx=ptx,
    native=native,
    layout=_layout,
    split=_split,
    computed=lambda _: (),
    indices=_indices,
)
_float_op = Op(
    "float_embedding",
    _float_reference,
    shapes=_shapes,
    native=native,
    vmap=by_reference,
    derivative=Linear(),
    layout=_layout,
    split=_split,
    computed=lambda _: (),
    indices=_indices,
)
