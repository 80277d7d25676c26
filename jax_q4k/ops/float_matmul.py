"""Multiplies activations by float weights, by XLA or by the native kernels.

The native kernels read 16-bit weights directly.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..native import calls
from ..sharding.layout import Layout, Parts
from .derivatives import Linear
from .op import Op
from .vmaps import by_reference, by_rows

#: Rows of activations up to which the native kernels take float32 weights; XLA's product of two
#: float32 matrices is faster beyond. For 16-bit weights XLA would make a float32 copy, and keep it
#: while a loop runs.
MAX_F32_ROWS = 16


def float_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """x (m, k) times w (n, k) transposed, accumulated in float32, of x's dtype; m and n at least 1.

    Differentiable in both, any number of times; transposes are plain JAX.
    """
    y: jax.Array = op.bind(x, w)
    return y


def dot(x: jax.Array, weights: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Returns x (m, k) times weights (n, k) transposed, in float32.

    With `transposed`, returns x (m, n) times the weights without transposing them.
    """
    # HIGHEST: XLA's default for float32 on a GPU is tf32, 10 bits of mantissa.
    return jax.lax.dot_general(
        x.astype(jnp.float32),
        weights.astype(jnp.float32),
        (((1,), (0 if transposed else 1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def reference(x: jax.Array, w: jax.Array) -> jax.Array:
    """`float_matmul` in plain JAX."""
    return dot(x, w).astype(x.dtype)


def native(x: jax.Array, w: jax.Array) -> jax.Array:
    """`float_matmul` by the native kernels, if they are faster or save a copy of the weights."""
    rows = x.shape[0]
    few = isinstance(rows, int) and rows <= MAX_F32_ROWS  # a symbolic size may be large
    if w.dtype == jnp.float32 and not few:
        return reference(x, w)
    (y,) = calls.linear(x.astype(jnp.float32), [w], quantized=False)
    return y.astype(x.dtype)


def _split(parts: Parts, call: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies a device's shard of k; sums over devices in float32."""
    total: jax.Array = parts.sum(call(op, x.astype(jnp.float32), w), "k")
    return total.astype(x.dtype)


#: The primitive.
op = Op(
    "float_matmul",
    reference,
    shapes=lambda x, w: jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), x.dtype),
    native=native,
    vmap=functools.partial(by_rows, otherwise=by_reference),
    derivative=Linear(),
    layout=lambda *_: Layout(("m k", "n k"), "m n", combined="k"),
    split=_split,
)
