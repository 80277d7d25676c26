"""Attention of new tokens, one or a chunk per sequence, over a paged KV cache."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import checks
from .attend import Operands, attend, checked


def paged_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_tables: Any,
    context_lens: Any,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    value_dim: int | None = None,
    lengths: Any = None,
    q_rest: Any = None,
    gate: Any = None,
) -> jax.Array:
    """softmax(scale * q . K) V over the first context_lens[b] tokens of every sequence, in float32.

    With a time axis, q is a chunk of each sequence: its last lengths[b] tokens, whose keys and
    values are already in the pages. Token t is number context_lens[b] - lengths[b] + t of its
    sequence, and sees the tokens up to itself. This serves chunked prefill, prompts that continue a
    cached prefix, and verification of draft tokens; chunks of a batch may differ in length. Padding
    gets zeros.

    Tensor cores, if they are used, take q and the softmax weights as sums of two 16-bit floats.
    Query head h uses KV head h // (num_heads / num_kv_heads). Token t of sequence b is in page
    block_tables[b, t // page_size] at offset t % page_size. A sequence of length 0 gives zeros; a
    length beyond the table counts as the table's capacity; tokens with a page id outside
    0..num_pages-1 are ignored. Data in pages beyond a sequence's length has no effect, even NaN.

    Latent pages (multi-head latent attention, https://arxiv.org/abs/2405.04434) are a single array,
    k_pages, whose rows begin with the values; each row is read once. v_pages is then None.

    Sequences may come in groups, each with its own part of the pages: block tables (groups, batch /
    groups, pages_per_sequence) hold ids that count from the first page of the group's part. Groups
    and their pages may be split over devices.

    `native` reads the pages of a chunk once for many of its queries; a token's bits do not depend
    on how many tokens its chunk has. `ptx` and `sim` do so if heads are at most 256 wide and
    reading them for every token would be 64 MB or more. Pages that are neither bfloat16 nor
    float16 are first converted to bfloat16, if that takes at most 1 GB. Otherwise, every token is
    a sequence of its own.

    Args:
      q: (batch, num_heads, head_dim), or (batch, time, num_heads, head_dim), float32, bfloat16 or
        float16.
      k_pages, v_pages: (num_pages, num_kv_heads, page_size, head_dim) float32, bfloat16, float16,
        int8 or float8_e4m3fn; page_size a multiple of 16, head_dim one of 32, 48, ..., 512. If
        v_pages is None, k_pages are latent, and head_dim is one of 32, 64, ..., 576.
      block_tables: (batch, pages_per_sequence) integers, or (groups, batch / groups,
        pages_per_sequence).
      context_lens: (batch,) integers.
      scale: None means head_dim ** -0.5, which no model with latent pages uses.
      window: sliding window: only the last `window` tokens of a context are seen; None means all.
      soft_cap: scores become soft_cap * tanh(score / soft_cap); None leaves them unchanged.
      sinks: (num_heads,) floats, finite or -inf: a logit per query head that takes part in the
        softmax and has no value; or None.
      k_scales, v_scales: scales of int8 pages, (num_pages, num_kv_heads, page_size) float32, as
        `append_kv` writes them: a value is its int8 times the scale of its page, head and slot.
        Latent pages have only k_scales.
      value_dim: number of values at the start of a latent row, a multiple of 32; only for latent
        pages.
      lengths: (batch,) integers, 0 to time, at most context_lens: tokens of each chunk; None means
        time. Only for a q with a time axis.
      q_rest: the last head_dim - value_dim elements of the queries, (batch, [time,] num_heads,
        head_dim - value_dim), if q has the first value_dim only; for latent pages. None means that
        q has all of them.
      gate: floats of the result's shape, whose sigmoid multiplies the result; None means no gate.

    Returns:
      q's shape and dtype; for latent pages the last axis is value_dim.

    Raises:
      TypeError, ValueError: dtypes or shapes that don't fit; outside a traced program also lengths
        and page ids out of range.
      NotImplementedError: under differentiation; there is no derivative.
    """
    of_rows = block_tables, context_lens, lengths
    operands, params = checked_pages(
        Operands(q, k_pages, v_pages, k_scales, v_scales, *of_rows, sinks, q_rest, gate),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        value_dim=value_dim,
    )
    return attend(operands, params)


def checked_pages(
    given: Operands,
    *,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
    value_dim: int | None = None,
) -> tuple[Operands, dict[str, Any]]:
    """Checks `paged_attention`'s arguments; returns the primitive's operands and parameters."""
    q, k_pages, v_pages, k_scales, v_scales, block_tables, context_lens, lengths, *_ = given
    if (v_pages is None) != (value_dim is not None):
        raise TypeError(
            f"value_dim={value_dim} with v_pages {'None' if v_pages is None else 'given'}: latent "
            "pages have the one and not the other"
        )
    k_pages, v_pages, k_scales, v_scales = (
        checks.latent_pages(k_pages, k_scales, v_scales)
        if v_pages is None
        else checks.pages(k_pages, v_pages, k_scales, v_scales)
    )
    num_pages, _, page_size, head_dim = k_pages.shape
    if value_dim is not None:
        value_dim = checks.value_dim(value_dim, head_dim)
    of_heads = head_dim if given.q_rest is None else value_dim
    if of_heads is None:
        raise TypeError("q_rest belongs to latent pages; v_pages is given")
    q, window = checks.queries(q, of_heads), checks.window(window)
    q_rest = _like(q, "q_rest", given.q_rest, head_dim - of_heads)
    gate = _like(q, "gate", given.gate, value_dim or head_dim)
    batch, lengths = q.shape[0], _lengths(lengths, q)
    block_tables = checks.int32_array("block_tables", block_tables)
    context_lens = checks.int32_array("context_lens", context_lens)
    *rows, per_sequence = block_tables.shape or (0,)
    if len(rows) not in (1, 2) or math.prod(rows) != batch or per_sequence < 1:
        raise ValueError(
            f"block_tables has shape {block_tables.shape}; it must be (batch={batch}, "
            "pages_per_sequence), or have groups of the batch in front"
        )
    if len(rows) == 2:
        num_pages //= checks.page_groups("block_tables", block_tables, k_pages)
    checks.same_shape("context_lens", context_lens, (batch,), "(batch,)")
    if batch and checks.is_concrete(block_tables, context_lens):
        tables = np.asarray(block_tables).reshape(batch, per_sequence)
        if lengths is not None and checks.is_concrete(lengths):
            _check_lengths(np.asarray(lengths), np.asarray(context_lens), q.shape[1])
        seen = window if window is None or q.ndim == 3 else window + q.shape[1] - 1
        _check_values(tables, np.asarray(context_lens), num_pages, page_size, seen)
    of_rows = block_tables, context_lens, lengths
    pages = k_pages, v_pages, k_scales, v_scales
    operands = Operands(q, *pages, *of_rows, given.sinks, q_rest, gate)
    return checked(operands, scale=scale, window=window, soft_cap=soft_cap, value_dim=value_dim)


def _like(q: jax.Array, name: str, x: Any, width: int) -> jax.Array | None:
    """Returns floats `x` with a row of `width` elements for each of q's; None if absent."""
    if x is None:
        return None
    x = checks.float_array(name, x)
    checks.same_shape(name, x, (*q.shape[:-1], width), f"q's shape with a last axis of {width}")
    return x


def _lengths(lengths: Any, q: jax.Array) -> jax.Array | None:
    """Returns each chunk's number of tokens, int32 (batch,); None if q has no time axis."""
    if q.ndim == 3:
        if lengths is not None:
            raise TypeError(f"lengths belongs to a q with an axis of time; q has shape {q.shape}")
        return None
    batch, time = q.shape[:2]
    if lengths is None:
        # not a constant, which would be copied to the device
        counted = jax.lax.broadcasted_iota(jnp.int32, (batch, time + 1), 1)
        return jax.lax.slice_in_dim(counted, time, time + 1, axis=1).reshape(batch)
    lengths = checks.int32_array("lengths", lengths)
    checks.same_shape("lengths", lengths, (batch,), "(batch,)")
    return lengths


def _check_lengths(lengths: np.ndarray, context_lens: np.ndarray, time: int) -> None:
    if lengths.min() < 0 or lengths.max() > time or (lengths > context_lens).any():
        raise ValueError(
            f"lengths={lengths.tolist()} must be 0 to time={time}, and at most "
            f"context_lens={context_lens.tolist()}, which count them"
        )


def _check_values(
    block_tables: np.ndarray,
    context_lens: np.ndarray,
    num_pages: int,
    page_size: int,
    window: int | None,
) -> None:
    capacity = block_tables.shape[1] * page_size
    if context_lens.min() < 0 or context_lens.max() > capacity:
        raise ValueError(
            f"context_lens={context_lens.tolist()} must be 0 to {capacity}, "
            f"pages_per_sequence={block_tables.shape[1]} times page_size={page_size}"
        )
    first = np.arange(block_tables.shape[1]) * page_size  # first token of each page
    used = first < context_lens[:, None]
    if window is not None:
        used &= first + page_size > context_lens[:, None] - window
    wrong = block_tables[used & ((block_tables < 0) | (block_tables >= num_pages))]
    if wrong.size:
        raise ValueError(
            f"block_tables holds page {wrong[0]}; pages in use must be 0 to {num_pages - 1}"
        )
