"""Rotary position embeddings: rotates pairs of a head's dimensions by the token's angles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..native import calls
from ..sharding.layout import Layout, Rows
from . import checks
from .op import Op


def rotate(x: Any, cos: Any, sin: Any, *, interleaved: bool) -> jax.Array:
    """Rotates the first rope_dim dimensions of every head by its token's angles.

    They rotate in pairs: dimensions (2i, 2i + 1) if `interleaved` (GPT-J, llama files), otherwise
    (i, i + rope_dim / 2) (NEOX, Qwen), by angle i of the token (https://arxiv.org/abs/2104.09864).

    `ptx` and `sim` have no kernel for it and run plain JAX, like `xla`.

    Args:
      x: (..., heads, head_dim) float32, bfloat16 or float16.
      cos, sin: (..., rope_dim / 2) of these dtypes, with x's leading axes and rope_dim at most
        head_dim.

    Returns:
      x's shape and dtype. Differentiable.

    Raises:
      TypeError, ValueError: dtypes or shapes that don't fit.
    """
    x, cos, sin = (
        checks.float_array(name, a) for name, a in (("x", x), ("cos", cos), ("sin", sin))
    )
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}; it must be (..., heads, head_dim)")
    *leading, heads, head_dim = x.shape
    if cos.shape[:-1] != (*leading,) or not 0 < 2 * cos.shape[-1] <= head_dim:
        rows = "".join(f"{n}, " for n in leading)
        raise ValueError(
            f"cos has shape {cos.shape}; it must be ({rows}rope_dim / 2 <= {head_dim // 2})"
        )
    checks.same_shape("sin", sin, cos.shape, "cos's shape")
    interleaved = checks.flag("interleaved", interleaved)
    if x.size == 0:
        return x
    tokens = Rows.of(x, dims=2)
    merged = (tokens.merge(a).astype(jnp.float32) for a in (x, cos, sin))
    return tokens.split(_op.bind(*merged, interleaved=interleaved)).astype(x.dtype)


def reference(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool) -> jax.Array:
    """`rotate` in plain JAX: x (tokens, heads, head_dim), cos and sin (tokens, rope_dim / 2)."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
    else:
        a, b = rotated[..., :half], rotated[..., half:]
    pair = a * cos - b * sin, a * sin + b * cos
    joined = (
        jnp.stack(pair, axis=-1).reshape(rotated.shape)
        if interleaved
        else jnp.concatenate(pair, axis=-1)
    )
    return jnp.concatenate([joined, rest], axis=-1) if rest.shape[-1] else joined


def native(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool) -> jax.Array:
    """`rotate` by a native kernel; XLA would recompute the angles in every layer."""
    return calls.rotate(x, cos, sin, interleaved=interleaved)


_op = Op(
    "rotate",
    reference,
    shapes=lambda x, *_, **__: x,
    native=native,
    derivative="reference",
    layout=lambda *_, **__: Layout(("t h _", "t _", "t _"), "t h _"),
)
