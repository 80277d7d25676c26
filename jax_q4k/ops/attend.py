"""Attention of one query token per sequence: the primitive behind `paged_attention` and
`attention`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ptx_kernels import tuning
from ptx_kernels.kernels.attention import merge_attention, paged_attention

from ..custom_call import ptx_name
from ..native import calls
from . import checks
from .op import KernelCall, Op


class Operands(NamedTuple):
    """The primitive's operands in order; those that are None are left out.

    `k` and `v`: (num_pages, num_kv_heads, page_size, head_dim), or without block tables (batch,
    num_kv_heads, capacity, head_dim); int8 ones have scales of the first three axes.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    k_scales: jax.Array | None
    v_scales: jax.Array | None
    block_tables: jax.Array | None
    context_lens: jax.Array
    sinks: jax.Array | None

    def given(self) -> list[jax.Array]:
        return [array for array in self if array is not None]

    @classmethod
    def restore(cls, arrays: tuple[jax.Array, ...], *, contiguous: bool, sinks: bool) -> Operands:
        scaled = arrays[1].dtype == jnp.int8
        given = (True, True, True, scaled, scaled, not contiguous, True, sinks)
        left = iter(arrays)
        return cls(*(next(left) if there else None for there in given))  # type: ignore[arg-type]


def checked(
    operands: Operands, *, scale: float | None, window: int | None, soft_cap: float | None
) -> tuple[Operands, dict[str, Any]]:
    """What all attention checks once its arrays and window are: operands and parameters of the
    primitive.
    """
    num_kv_heads = operands.k.shape[1]
    _, num_heads, head_dim = operands.q.shape
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
    if operands.sinks is not None:
        sinks = checks.float_array("sinks", operands.sinks).astype(jnp.float32)
        checks.same_shape("sinks", sinks, (num_heads,), "(num_heads,)")
        operands = operands._replace(sinks=sinks)
    return operands, {
        "scale": head_dim**-0.5 if scale is None else checks.positive("scale", scale),
        "window": window,
        "soft_cap": None if soft_cap is None else checks.positive("soft_cap", soft_cap),
        "contiguous": operands.block_tables is None,
        "sinks": operands.sinks is not None,
    }


def attend(operands: Operands, params: dict[str, Any], implementation: str | None) -> jax.Array:
    """Binds the primitive to what `checked` gives; (batch, num_heads, head_dim)."""
    if operands.q.shape[0] == 0:
        return jnp.zeros(operands.q.shape, jnp.float32)
    (out,) = _op.bind(*operands.given(), **params, implementation=implementation)
    return out


def reference(
    *arrays: jax.Array,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    contiguous: bool,
    sinks: bool,
) -> list[jax.Array]:
    """The primitive in plain JAX."""
    given = Operands.restore(arrays, contiguous=contiguous, sinks=sinks)
    keys, values, known = _tokens(given)
    batch, num_kv_heads, capacity, head_dim = keys.shape
    lengths = jnp.clip(given.context_lens, 0, capacity)[:, None]
    visible = (jnp.arange(capacity) < lengths) & known
    if window is not None:
        visible &= jnp.arange(capacity) >= lengths - window
    mask = visible[:, None, None, :]
    groups = given.q.reshape(batch, num_kv_heads, -1, head_dim)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bhgd,bhtd->bhgt", groups, keys, precision=highest) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if given.sinks is not None:
        logits = given.sinks.reshape(1, num_kv_heads, -1, 1)
        top = jnp.maximum(top, logits)
    # Scores masked to -inf stay out of `exp`: -inf minus the -inf top of an empty sequence would be
    # NaN.
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0.0)), 0.0)
    values = jnp.where(visible[:, None, :, None], values, 0.0)  # 0 * NaN would be NaN
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if given.sinks is not None:
        total += jnp.exp(logits - top)
    out = jnp.einsum("bhgt,bhtd->bhgd", weights, values, precision=highest)
    out = jnp.where(jnp.any(mask, axis=-1, keepdims=True), out / total, 0.0)
    return [out.reshape(given.q.shape)]


def _tokens(given: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(keys, values, known): float32 (batch, num_kv_heads, capacity, head_dim), and which tokens
    lie in real pages.
    """
    rows, scales = (given.k, given.v), (given.k_scales, given.v_scales)
    floats = [r.astype(jnp.float32) for r in rows]
    floats = [f if s is None else f * s[..., None] for f, s in zip(floats, scales, strict=True)]
    if given.block_tables is None:
        return floats[0], floats[1], jnp.ones((given.k.shape[0], given.k.shape[2]), jnp.bool_)
    num_pages, num_kv_heads, page_size, head_dim = given.k.shape
    known = (given.block_tables >= 0) & (given.block_tables < num_pages)
    pages = jnp.where(known, given.block_tables, 0)
    shape = (pages.shape[0], num_kv_heads, pages.shape[1] * page_size, head_dim)
    keys, values = (jnp.moveaxis(f[pages], 2, 1).reshape(shape) for f in floats)
    return keys, values, jnp.repeat(known, page_size, axis=1)


def kernels(
    launch: KernelCall,
    *arrays: jax.Array,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    contiguous: bool,
    sinks: bool,
    output: str = "f32",
) -> list[jax.Array]:
    """The primitive by PTX kernels: one, or two where the contexts are split.

    output: `q8_1`, where head_dim is a multiple of 32: what `quantize_q8_1` makes of (batch,
    num_heads * head_dim).
    """
    given = Operands.restore(arrays, contiguous=contiguous, sinks=sinks)
    batch, num_heads, head_dim = given.q.shape
    num_pages, num_kv_heads, page_size, _ = given.k.shape
    per_sequence = 1 if given.block_tables is None else given.block_tables.shape[1]
    capacity = min(per_sequence * page_size, window or per_sequence * page_size)
    dtype = ptx_name(given.k.dtype)
    config = tuning.paged_attention(batch, num_heads, num_kv_heads, head_dim, capacity, dtype)
    kernel = paged_attention(
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_pages=num_pages,
        page_size=page_size,
        pages_per_sequence=per_sequence,
        scale=scale,
        dtype=dtype,
        contiguous=contiguous,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        output=output if config.splits == 1 else "f32",
        config=config,
    )
    results = launch(kernel, *arrays)
    if config.splits == 1:
        return results
    merge = merge_attention(
        batch=batch,
        num_heads=num_heads,
        head_dim=head_dim,
        splits=config.splits,
        output=output,
        config=tuning.merge_attention(head_dim, config.splits),
    )
    return launch(merge, *results)


def native(*arrays: jax.Array, **params: Any) -> list[jax.Array]:
    """The primitive by the CPU's kernels."""
    return [calls.paged_attention(arrays, **params)]


def _abstract_eval(q: Any, *_: Any, **__: Any) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(q.shape, jnp.float32)]


_op = Op(
    "paged_attention",
    abstract_eval=_abstract_eval,
    reference=reference,
    kernels=kernels,
    native=native,
)
