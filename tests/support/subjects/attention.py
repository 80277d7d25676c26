"""Subjects for attention."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ptx_kernels import simulator
from ptx_kernels.kernels.attention import (
    CausalAttentionConfig,
    MergeConfig,
    PagedAttentionConfig,
    SplitKeysConfig,
    causal_attention,
    merge_attention,
    paged_attention,
    split_keys,
)
from support.oracles import (
    attention,
    bf16_parts,
    dequantized,
    loaded,
    quantized,
    stored,
)
from support.oracles import (
    causal_attention as causal_oracle,
)

from .base import Subject, rng_of
from .pages import cached, page_operands

_TWO_WARPS = PagedAttentionConfig(warps=2, queries=2)


def read_q8_1(values: np.ndarray, scale_sum: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Dequantizes q8_1 groups; also returns the errors of their sums, which must be 0."""
    scale, total = scale_sum[..., 0], scale_sum[..., 1]
    sums = np.rint(np.divide(total, scale, out=total.copy(), where=scale != 0))
    return dequantized(values, scale_sum), sums - values.reshape(*scale.shape, 32).sum(
        -1, dtype=np.int32
    )


def attention_subject(
    head_dim: int = 64,
    dtype: str = "f32",
    config: PagedAttentionConfig = _TWO_WARPS,
    *,
    contiguous: bool = False,
    sinks: bool = False,
    output: str = "f32",
    q_size: float = 1.0,
    tolerance: float = 1e-13,
    value_dim: int | None = None,
    context: int = 37,
    q_rest: bool = False,
    gate: bool = False,
    **options: Any,
) -> Subject:
    """Two KV heads of three query heads each; contexts of `context`, 0, 1 and 48 tokens.

    A `value_dim` makes the pages latent. `q_rest`, `gate`: see `paged_attention`.

    The last context fills its pages.

    Slots outside of all contexts are NaN. Their table entries are out of range, and so are two
    entries within contexts.
    """
    rng = rng_of(1, head_dim)
    lengths = np.array([context, 0, 1, 48], np.int32)
    page_size, width = (48, 1) if contiguous else (16, 3)
    num_pages = 4 * width
    q = rng.standard_normal((4, 6, head_dim), np.float32) * np.float32(q_size)
    tables = rng.permutation(num_pages).reshape(4, width).astype(np.int32)
    used = np.zeros((num_pages, page_size), bool)
    if contiguous:
        tables = np.arange(4, dtype=np.int32)[:, None]
    else:
        tables[0, 1] = tables[3, 2] = num_pages
    for table, length in zip(tables, lengths, strict=True):
        for t in range(length)[-options.get("window", length + 1) :]:
            if table[t // page_size] < num_pages:
                used[table[t // page_size], t % page_size] = True
        if not contiguous:
            table[-(-length // page_size) :] = num_pages
    kinds = 2 if value_dim is None else 1
    shape = num_pages, 2, page_size, head_dim
    exact = [rng.standard_normal(shape, np.float32) for _ in range(kinds)]
    pages = [cached(x, dtype) for x in exact]
    unused = np.broadcast_to(~used[:, None], (num_pages, 2, page_size))
    for page in pages:
        page[-1][unused] = {"bf16": 0x7FC0, "fp8": 0x7F}.get(dtype, np.nan)
    held = [
        rows * scale[0][..., None] if (scale := rest) else loaded(rows, dtype)
        for rows, *rest in pages
    ]
    logits = rng.standard_normal(6).astype(np.float32) if sinks else None
    build = functools.partial(
        paged_attention,
        batch=4,
        num_heads=6,
        num_kv_heads=2,
        head_dim=head_dim,
        num_pages=num_pages,
        page_size=page_size,
        pages_per_sequence=width,
        scale=head_dim**-0.5,
        dtype=dtype,
        contiguous=contiguous,
        sinks=sinks,
        value_dim=value_dim,
        q_rest=q_rest,
        gate=gate,
        config=config,
        **options,
    )
    front, rest = (q[..., :value_dim], q[..., value_dim:]) if q_rest else (q, None)
    gates = rng.standard_normal((4, 6, value_dim or head_dim), np.float32) if gate else None
    of_rows = None if contiguous else tables, lengths, logits
    given = (front, *page_operands(pages), *of_rows, rest, gates)
    operands = tuple(x for x in given if x is not None)
    values = held[-1][..., :value_dim]
    want = attention(q, held[0], values, tables, lengths, head_dim**-0.5, sinks=logits, **options)
    want = want if gates is None else want / (1 + np.exp(-gates.astype(np.float64)))
    if config.splits > 1 and not config.cluster:
        return Subject(build(), operands, (want,), tolerance, merged)
    if output == "q8_1":
        (y,) = simulator.run(build(), *operands)
        wants = read_q8_1(*quantized(y.reshape(4, -1)))
        return Subject(build(output=output), operands, wants, tolerance, read_q8_1)
    return Subject(build(), operands, (want,), tolerance)


def merged(parts: np.ndarray, marks: np.ndarray) -> tuple[np.ndarray]:
    """Merges the splits of attention in float64: (batch, heads, head_dim)."""
    highest, total = marks[..., 0].astype(np.float64), marks[..., 1]
    factors = np.exp2(highest - highest.max(-1, keepdims=True))
    together, weight = (factors[..., None] * parts).sum(2), (factors * total).sum(-1)[..., None]
    return (np.divide(together, weight, out=np.zeros_like(together), where=weight > 0),)


def merge_subject(config: MergeConfig, *, gate: bool = False) -> Subject:
    """Eleven splits, of which the third and the last are empty.

    All splits of one head are empty. The scores of another head are far apart.
    """
    rng = rng_of(10)
    parts, marks = (
        rng.standard_normal((2, 3, 11, 48), np.float32),
        rng.uniform(1, 9, (2, 3, 11, 2)).astype(np.float32),
    )
    marks[0, 1, :, 0] = [-300, 200, 0, 300, 299, -150, 0, 301, -299, 300, 0]
    for empty in (np.s_[:, :, [2, 10]], np.s_[1, 1]):
        parts[empty], marks[empty] = 0, [-3e38, 0]
    sizes = dict(batch=2, num_heads=3, head_dim=48, splits=11)
    kernel = merge_attention(**sizes, gate=gate, config=config)
    (want,) = merged(parts, marks)
    if not gate:
        return Subject(kernel, (parts, marks), (want,), 1e-12)
    gates = rng.standard_normal(want.shape, np.float32)
    want = want / (1 + np.exp(-gates.astype(np.float64)))
    return Subject(kernel, (parts, marks, gates), (want,), 1e-12)


def causal_subject(
    config: CausalAttentionConfig,
    *,
    time: int = 37,
    head_dim: int = 32,
    value_dim: int = 32,
    sinks: bool = False,
    parts: int = 2,
    key_parts: int = 2,
    tolerance: float = 3e-11,
    **options: Any,
) -> Subject:
    """Prompts with all, 0 and 5 valid tokens; two KV heads of three query heads each.

    Padding holds NaN, and its results are not compared.
    """
    rng = rng_of(4, head_dim)
    lengths = np.array([time, 0, 5], np.int32)
    q = rng.standard_normal((3, time, 6, head_dim), np.float32)
    keys, values = (
        sum(
            (part.astype(np.uint32) << 16).view(np.float32)
            for part in bf16_parts(rng.standard_normal((3, time, 2, dim), np.float32), key_parts)
        )
        for dim in (head_dim, value_dim)
    )
    padding = np.arange(time) >= lengths[:, None]
    logits = np.array([0.5, -1, 3, -np.inf, 0, 1], np.float32) if sinks else None
    want = causal_oracle(q, keys, values, lengths, 0.3, sinks=logits, **options)
    for x in (q, keys, values):
        x[padding] = np.nan
    kernel = causal_attention(
        batch=3,
        time=time,
        num_heads=6,
        num_kv_heads=2,
        head_dim=head_dim,
        value_dim=value_dim,
        scale=0.3,
        sinks=sinks,
        parts=parts,
        key_parts=key_parts,
        config=config,
        **options,
    )
    split = [part for x in (keys, values) for part in bf16_parts(x, key_parts)]
    operands = (q, *split, lengths, *([] if logits is None else [logits]))

    def real(out: np.ndarray) -> tuple[np.ndarray]:
        return (out[~padding],)

    return Subject(kernel, operands, real(want), tolerance, real)


#: (cached tokens, tokens of the chunk) of each sequence of `piece_subject`; None: all tokens.
PIECES = ((23, None), (0, 5), (40, 0), (46, 3))


def piece_subject(
    config: CausalAttentionConfig,
    dtype: str = "bf16",
    *,
    group: int = 3,
    time: int = 7,
    head_dim: int = 32,
    page_size: int = 16,
    sinks: bool = False,
    missing: bool = False,
    q_size: float = 1.0,
    parts: int = 2,
    key_parts: int = 1,
    tolerance: float = 3e-11,
    **options: Any,
) -> Subject:
    """Chunks of `PIECES` over pages; two KV heads.

    The last chunk exceeds the capacity of its pages. For f32 pages the kernel gets `key_parts` bf16
    parts, in the order of the tables. Slots that no token sees are NaN. Their table entries are out
    of range, and so are an entry within the last context and, if `missing`, one of the first.
    Results of padding are zeros.
    """
    rng, width = rng_of(16, head_dim), -(-48 // page_size)
    lengths = np.array([time if n is None else n for _, n in PIECES], np.int32)
    before = np.array([n for n, _ in PIECES], np.int32)
    num_pages, heads, batch = 4 * width, 2 * group, len(PIECES)
    q = rng.standard_normal((batch, time, heads, head_dim), np.float32) * np.float32(q_size)
    rows = q.reshape(-1, head_dim)
    if dtype == "f16":  # one large element, which overflows if a scale ignores it
        each = np.arange(len(rows))
        rows[each, each % head_dim] = 8 * q_size
    tables = rng.permutation(num_pages).reshape(batch, width).astype(np.int32)
    tables[3, 0] = num_pages
    if missing:
        tables[0, 1 if width > 1 else 0] = -1
    positions = before[:, None] + np.arange(time)
    lens = np.where(np.arange(time) < lengths[:, None], positions + 1, 0)
    used = np.zeros((num_pages, page_size), bool)
    for table, row in zip(tables, lens, strict=True):
        for length in np.minimum(row, width * page_size):
            for t in range(length)[-options.get("window", 1 << 30) :]:
                if 0 <= table[t // page_size] < num_pages:
                    used[table[t // page_size], t % page_size] = True
        table[-(-row.max() // page_size) :] = num_pages
    shape = num_pages, 2, page_size, head_dim
    pages = [stored(rng.standard_normal(shape, np.float32), dtype) for _ in range(2)]
    for rows in pages:
        rows[np.broadcast_to(~used[:, None], shape[:3])] = {"bf16": 0x7FC0}.get(dtype, np.nan)
    logits = np.resize(np.float32([0.5, -1, 3, -np.inf, 0, 1]), heads) if sinks else None
    held = [loaded(rows, dtype) for rows in pages]
    flat = q.reshape(-1, heads, head_dim), *held, np.repeat(tables, time, 0), lens.reshape(-1)
    want = attention(*flat, 0.3, sinks=logits, **options).reshape(q.shape)
    q[lens == 0] = np.nan
    sizes = dict(num_heads=heads, num_kv_heads=2, head_dim=head_dim, value_dim=head_dim)
    of_pages: dict[str, Any] = dict(page_size=page_size, pages_per_sequence=width)
    of_pages |= dict(num_pages=num_pages, dtype=dtype)
    given_pages = pages
    if dtype == "f32":
        ordered = [np.where(np.isnan(x := rows[tables % num_pages]), 0, x) for rows in pages]
        parts_of = [bf16_parts(x.reshape(-1, *shape[1:]), key_parts) for x in ordered]
        given_pages = [part for each in parts_of for part in each]
        of_pages |= dict(num_pages=tables.size, dtype="bf16", named_pages=num_pages)
    kernel = causal_attention(
        batch=batch,
        time=time,
        scale=0.3,
        sinks=sinks,
        parts=parts,
        key_parts=key_parts,
        config=config,
        **sizes,
        **of_pages,
        **options,
    )
    given = q, *given_pages, tables, before + lengths, lengths, logits
    operands = tuple(x for x in given if x is not None)
    if config.splits == 1:
        return Subject(kernel, operands, (want,), tolerance)
    return Subject(kernel, operands, (want.reshape(-1, heads, head_dim),), tolerance, merged)


def split_subject() -> Subject:
    """Keys of 48 dimensions and values of 16, in two parts each."""
    rng, sizes = rng_of(15), dict(batch=2, time=5, num_kv_heads=3, head_dim=48, value_dim=16)
    k, v = (rng.standard_normal((2, 5, 3, dim), np.float32) for dim in (48, 16))
    kernel = split_keys(**sizes, parts=2, config=SplitKeysConfig(warps=1))

    def floats(*parts: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple((p.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for p in parts)

    return Subject(kernel, (k, v), floats(*bf16_parts(k, 2), *bf16_parts(v, 2)), 0, floats)
