"""Attention of a prompt: every token attends to itself and to those before it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..native import calls
from ..selection import current_selection
from ..sharding.layout import Layout
from . import checks
from .op import KernelCall, Op
from .vmaps import by_rows

#: Queries scored at a time in plain JAX; their scores take batch * num_heads * QUERY_BLOCK * time
#: floats.
QUERY_BLOCK = 256


def causal_attention(
    q: Any,
    k: Any,
    v: Any,
    lengths: Any,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
) -> jax.Array:
    """softmax(scale * q . K) V of each token over itself and those before it, in float32.

    Tokens at or beyond lengths[b] are padding and do not affect other tokens' results. `ptx` and
    `sim` multiply floats as sums of bf16 terms: two, with a relative error of about 5e-6, or with
    `activations="f32"` (see `implementation`) three, which is as exact as float32. Head and value
    widths that are not a multiple of 16, or above 256 (192 for `f32`), run in plain JAX, as in
    `xla`.

    Args:
      q: (batch, time, num_heads, head_dim) float32, bfloat16 or float16.
      k, v: (batch, time, num_kv_heads, head_dim) of these dtypes; query head h uses KV head h //
        (num_heads / num_kv_heads). v may have another last axis, value_dim.
      lengths: (batch,) integers.
      scale: None means head_dim ** -0.5.
      window: sliding window: a token sees the last `window` tokens, itself included; None means
        all.
      soft_cap, sinks: see `paged_attention`.

    Returns:
      (batch, time, num_heads, value_dim) of q's dtype; unspecified for padding. Differentiable.

    Raises:
      TypeError, ValueError: dtypes or shapes that don't fit.
    """
    q, k, v = (checks.float_array(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    lengths = checks.int32_array("lengths", lengths)
    if q.ndim != 4:
        raise ValueError(f"q has shape {q.shape}; it must be (batch, time, num_heads, head_dim)")
    batch, time, num_heads, head_dim = q.shape
    if k.ndim != 4 or (k.shape[:2], k.shape[3]) != ((batch, time), head_dim):
        raise ValueError(
            f"k has shape {k.shape}; it must be ({batch}, {time}, num_kv_heads, {head_dim}), "
            "as q is"
        )
    if k.shape[2] < 1 or num_heads % k.shape[2]:
        raise ValueError(f"num_heads={num_heads} must be a multiple of num_kv_heads={k.shape[2]}")
    if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v has shape {v.shape}; it must be ({batch}, {time}, {k.shape[2]}, value_dim), as k is"
        )
    if not head_dim and v.size:
        raise ValueError(f"q has shape {q.shape}; head_dim=0 must be positive")
    checks.same_shape("lengths", lengths, (batch,), "(batch,)")
    sinks = checks.sinks(sinks, num_heads)
    checked_scale = None if scale is None else checks.positive("scale", scale)
    params: dict[str, Any] = {
        "window": checks.window(window),
        "soft_cap": None if soft_cap is None else checks.positive("soft_cap", soft_cap),
    }
    if q.size == 0 or v.shape[3] == 0:
        return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    params["scale"] = head_dim**-0.5 if checked_scale is None else checked_scale
    params["activations"] = current_selection().activations
    floats = (x.astype(jnp.float32) for x in (q, k, v))
    out: jax.Array = _op.bind(*floats, lengths, sinks, **params)
    return out.astype(q.dtype)


def reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    activations: str | None = None,
) -> jax.Array:
    """`causal_attention` in plain JAX; `activations` has no effect."""
    batch, time, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    positions = jnp.arange(time)
    real = (positions < lengths[:, None])[:, :, None, None]
    k, v = jnp.where(real, k, 0.0), jnp.where(real, v, 0.0)  # 0 * NaN would be NaN
    q = (q * scale).reshape(batch, time, num_kv_heads, num_heads // num_kv_heads, head_dim)

    def block(queries: jax.Array, at: jax.Array) -> jax.Array:
        highest = jax.lax.Precision.HIGHEST
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", queries, k, precision=highest)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen = positions <= at[:, None]
        if window is not None:
            seen &= positions > at[:, None] - window
        scores = jnp.where(seen, scores, -jnp.inf)
        if sinks is not None:  # a sink is a key without a value
            logits = jnp.broadcast_to(
                sinks.reshape(*scores.shape[1:3], 1, 1), (*scores.shape[:-1], 1)
            )
            scores = jnp.concatenate([scores, logits], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :time]
        return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v, precision=highest)

    value_dim = v.shape[3]
    if time <= QUERY_BLOCK:
        return block(q, positions).reshape(batch, time, num_heads, value_dim)
    padded = -(-time // QUERY_BLOCK) * QUERY_BLOCK
    q = jnp.pad(q, ((0, 0), (0, padded - time), (0, 0), (0, 0), (0, 0)))
    q = jnp.moveaxis(q.reshape(batch, -1, QUERY_BLOCK, *q.shape[2:]), 1, 0)
    out = jax.lax.map(lambda args: block(*args), (q, jnp.arange(padded).reshape(-1, QUERY_BLOCK)))
    return jnp.moveaxis(out, 0, 1).reshape(batch, padded, num_heads, value_dim)[:, :time]


def ptx(
    launch: KernelCall,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    activations: str | None,
) -> jax.Array:
    """`causal_attention` by two PTX kernels, or in plain JAX for widths or GPUs without them."""
    from ptx_kernels.kernels.attention import causal_attention as causal_kernel
    from ptx_kernels.kernels.attention import (
        causal_attention_rule,
        prompt_attention_rule,
        split_keys,
    )
    from ptx_kernels.tuning import choose

    (batch, time, num_heads, head_dim), (num_kv_heads, value_dim) = q.shape, v.shape[2:]
    parts = 3 if activations == "f32" else 2
    if not choose(prompt_attention_rule, head_dim, value_dim, parts):
        return reference(q, k, v, lengths, sinks, scale=scale, window=window, soft_cap=soft_cap)
    rows = batch * num_kv_heads, time * num_heads // num_kv_heads
    sizes = {
        "batch": batch,
        "time": time,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "parts": parts,
    }
    kernel = causal_kernel(
        **sizes,
        num_heads=num_heads,
        scale=scale,
        window=None if window is None or window >= time else window,
        soft_cap=soft_cap,
        sinks=sinks is not None,
        key_parts=parts,
        config=choose(causal_attention_rule, *rows, head_dim, value_dim, parts, parts),
    )
    split = launch(split_keys(**sizes), k, v)
    (out,) = launch(kernel, q, *split, lengths, *(() if sinks is None else (sinks,)))
    return out


def native(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *others: Any,
    activations: str | None = None,
    **params: Any,
) -> jax.Array:
    """`causal_attention` by the native kernels, or in plain JAX for widths without a kernel.

    Computes in float32, whatever the activations.
    """
    if not calls.has_heads(q.shape[-1], v.shape[-1]):
        return reference(q, k, v, *others, **params)
    return calls.causal_attention(q, k, v, *others, **params)


_op = Op(
    "causal_attention",
    reference,
    shapes=lambda q, _, v, *__, **___: jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
    ptx=ptx,
    native=native,
    vmap=functools.partial(by_rows, operands=4),  # examples enlarge the batch
    derivative="reference",
    layout=lambda *_, **__: Layout((*["b _ h _"] * 3, "b", "h"), "b _ h _"),
)
