"""Simulates decode attention over random pages, with a float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_kernels import simulator
from ptx_kernels.kernels.attention import PagedAttentionConfig, merge_attention, paged_attention
from ptx_kernels.kernels.operands import random_operands
from ptx_kernels.simulator.traffic import total
from support.oracles import attention, int8_vectors, loaded, stored

_DEFAULT = PagedAttentionConfig()


def simulate(
    arguments: dict[str, Any], *operands: np.ndarray, output: str = "f32"
) -> tuple[np.ndarray, ...]:
    """Runs paged_attention, and merge_attention if the splits store partial results."""
    splits = arguments["config"].splits
    if splits == 1 or arguments["config"].cluster:
        return simulator.run(paged_attention(**arguments, output=output), *operands)
    parts, marks = simulator.run(paged_attention(**arguments), *operands)
    shape = {name: arguments[name] for name in ("batch", "num_heads")}
    shape["head_dim"] = arguments.get("value_dim") or arguments["head_dim"]
    return simulator.run(merge_attention(**shape, splits=splits, output=output), parts, marks)


def cached(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, used: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray, np.ndarray]:
    """Random pages: (operand, scales or None, the values they encode, values before rounding).

    Unused slots are poison: NaN, or an int8 scale of NaN.
    """
    exact = rng.standard_normal(shape, np.float32)
    unused = (
        np.zeros(shape[:3], bool) if used is None else np.broadcast_to(~used[:, None, :], shape[:3])
    )
    if dtype == "int8":
        rows, scales = int8_vectors(exact)
        scales[unused] = np.nan
        return rows, scales, rows * scales.astype(np.float64)[..., None], exact
    exact[unused] = np.nan
    rows = stored(exact, dtype)
    return rows, None, loaded(rows, dtype), exact


def run(
    lengths: list[int],
    *,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: str = "f32",
    contiguous: bool = False,
    poison: bool = True,
    sinks: list[float] | None = None,
    tables: np.ndarray | None = None,
    num_pages: int | None = None,
    rounded: bool = True,
    q_size: float = 2.0,
    value_dim: int | None = None,
    config: PagedAttentionConfig = _DEFAULT,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (simulated, wanted); slots that no sequence sees are poison unless `poison` is off.

    rounded: whether the oracle's keys and values are rounded, too. A `value_dim` makes the pages
    latent.
    """
    rng = np.random.default_rng(len(lengths) + head_dim)
    batch, heads = len(lengths), kv_heads * group
    width = max(1, *(-(-length // page_size) for length in lengths))
    if contiguous:
        page_size, width, num_pages, tables = page_size * width, 1, batch, np.arange(batch)[:, None]
    num_pages = num_pages or batch * width + 1
    if tables is None:
        tables = rng.permutation(num_pages)[: batch * width].reshape(batch, width)
    tables, width = tables.astype(np.int32), tables.shape[1]
    used = np.zeros((num_pages, page_size), bool)
    for table, length in zip(tables, lengths, strict=True):
        seen = range(min(max(length, 0), width * page_size))
        for t in seen[-options.get("window", 1 << 30) :]:
            if 0 <= table[t // page_size] < num_pages:
                used[table[t // page_size], t % page_size] = True
    shape = (num_pages, kv_heads, page_size, head_dim)
    k, v = (cached(rng, shape, dtype, used if poison else None) for _ in range(2))
    q = rng.standard_normal((batch, heads, head_dim), np.float32) * np.float32(q_size)
    lens, logits = (
        np.array(lengths, np.int32),
        None if sinks is None else np.resize(np.float32(sinks), heads),
    )
    arguments = dict(
        batch=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_pages=num_pages,
        page_size=page_size,
        pages_per_sequence=width,
        scale=head_dim**-0.5,
        dtype=dtype,
        contiguous=contiguous,
        sinks=sinks is not None,
        value_dim=value_dim,
        config=config,
        **options,
    )
    pages = [k[0], v[0], k[1], v[1]] if value_dim is None else [k[0], k[1]]
    operands = [q, *pages, None if contiguous else tables, lens, logits]
    (got,) = simulate(arguments, *(a for a in operands if a is not None))
    which = 2 if rounded else 3
    values = v[which] if value_dim is None else k[which][..., :value_dim]
    return got, attention(
        q, k[which], values, tables, lens, head_dim**-0.5, sinks=logits, **options
    )


def sectors(
    tokens: int,
    group: int,
    head_dim: int,
    dtype: str,
    config: PagedAttentionConfig,
    value_dim: int | None = None,
) -> int:
    """Counts the 32-byte sectors that warps read for `tokens` tokens of a KV head."""
    shape = dict(
        batch=1, num_heads=group, num_kv_heads=1, head_dim=head_dim, num_pages=1, page_size=tokens
    )
    options = dict(dtype=dtype, contiguous=True, value_dim=value_dim, config=config)
    kernel = paged_attention(**shape, pages_per_sequence=1, scale=0.1, **options)
    found = []
    for length in (0, tokens):
        traffic = simulator.Traffic()
        *operands, _ = random_operands(kernel)
        out = np.zeros((1, group, value_dim or head_dim), np.float32)
        buffers = [*operands, np.array([length], np.int32), out]
        dynamic = kernel.dynamic_shared_bytes
        simulator.launch(
            kernel.text,
            buffers,
            kernel.grid,
            kernel.block,
            dynamic_shared_bytes=dynamic,
            traffic=traffic,
        )
        found.append(total(traffic.global_).moved)
    return found[1] - found[0]
