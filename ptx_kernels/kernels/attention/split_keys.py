"""Kernel that splits keys and values into sums of bf16 parts, for tensor-core prompt attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...ptx import WARP, Builder, KernelError, Pointer, Value, bf16, f32, kernel, s32, u32
from ..pages import Pages, Spread, declare_pages
from .bf16_parts import split
from .prompt_sources import PromptPages

RUN = 8  # elements per thread: 16 bytes of each part


@dataclass(frozen=True)
class SplitKeysConfig:
    warps: int = 4  # per block


@kernel
def split_keys(
    k: Builder,
    *,
    batch: int,
    time: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    parts: int = 2,
    pages: PromptPages,
    seen: int | None = None,
    config: SplitKeysConfig = SplitKeysConfig(),
) -> None:
    """Kernel: splits f32 keys and values, or pages of a KV cache, into bf16 parts (`bf16_parts`).

    Operands: keys and values f32 (batch, time, num_kv_heads, head_dim or value_dim). Results: the
    parts of the keys, then of the values, each bf16 of the same shape.

    With a `dtype`, the operands are pages of keys and of values of that dtype (see
    `declare_pages`), then block_tables s32 (batch, pages_per_sequence) and context_lens s32
    (batch,). The results are pages too: each part of keys, then of values, is bf16 (batch *
    pages_per_sequence, num_kv_heads, page_size, head_dim), in the order of the tables. Pages beyond
    the first context_lens[b] tokens, or before the last `seen` of these tokens, are zeros. `seen`
    None means that all tokens are split.
    """
    if head_dim % RUN or value_dim % RUN or not 1 <= parts <= 3:
        raise KernelError(
            f"head_dim={head_dim} and value_dim={value_dim} must be multiples of {RUN}, "
            f"parts={parts} 1 to 3"
        )
    threads = WARP * config.warps
    if pages.dtype is not None:
        stored = declare_pages(k.input, pages.dtype, pages.shape(num_kv_heads, head_dim))
        _split_pages(k, stored, (batch, pages.pages_per_sequence), seen, parts, threads)
        return
    shapes = {
        name: (batch, time, num_kv_heads, d) for name, d in (("k", head_dim), ("v", value_dim))
    }
    sources = [k.input(name, f32, shape) for name, shape in shapes.items()]
    results = [
        [k.output(f"{name}{part}", bf16, shape) for part in range(parts)]
        for name, shape in shapes.items()
    ]
    runs = [math.prod(shape) // RUN for shape in shapes.values()]
    blocks = [-(-count // threads) for count in runs]
    k.launch((sum(blocks),), threads)
    with k.when(k.block_id() < blocks[0]) as keys:
        _split_run(k, sources[0], results[0], k.block_id() * threads + k.thread_id, runs[0])
    with keys.otherwise():
        run = (k.block_id() - blocks[0]) * threads + k.thread_id
        _split_run(k, sources[1], results[1], run, runs[1])


def _split_pages(
    k: Builder,
    pages: Sequence[Pages],
    tables: tuple[int, int],
    seen: int | None,
    parts: int,
    threads: int,
) -> None:
    """Emits the split of pages; each thread block splits a part of one page.

    `tables`: (sequences, pages per sequence).
    """
    num_pages, heads, size, head_dim = pages[0].rows.shape
    entries = k.input("block_tables", s32, tables)
    context_lens = k.input("context_lens", s32, tables[:1])
    made = math.prod(tables), heads, size, head_dim
    results = [[k.output(f"{name}{part}", bf16, made) for part in range(parts)] for name in "kv"]
    runs = heads * size * head_dim // RUN
    k.launch((-(-runs // threads), tables[1], tables[0]), threads)
    number, sequence = k.block_id("y"), k.block_id("z")
    page = entries.at(sequence, number).load().bits(u32)
    first_token, length = (number * size).bits(s32), context_lens.at(sequence).load()
    used = first_token < length
    if seen is not None:
        used = used & (first_token + size > length - seen)
    run = k.block_id() * threads + k.thread_id
    used = used & (page < num_pages)
    with k.when(run < runs):
        row, first = run // (head_dim // RUN), run % (head_dim // RUN) * RUN
        spread = Spread(WARP, ((first, RUN, None),))
        slot = row // size, row % size
        loaded = [each.load(spread, (page, *slot), used) for each in pages]
        for each, words, targets in zip(pages, loaded, results, strict=True):
            values, factor = each.values(k, spread, words)
            if factor is not None:
                values = [x * factor for x in values]
            number_of_all = sequence * tables[1] + number
            _store(k, values, [target.at(number_of_all, *slot, first) for target in targets])


def _split_run(k: Builder, source: Pointer, results: list[Pointer], run: Value, count: int) -> None:
    with k.when(run < count):
        values = source.reshape(count, RUN).at(run).load_run(0, RUN)
        _store(k, values, [result.reshape(count, RUN).at(run) for result in results])


def _store(k: Builder, values: Sequence[Value], addresses: Sequence[Pointer]) -> None:
    """Splits a run of f32 values into parts, and stores part i at addresses[i]."""
    pairs = [split(k, values[i : i + 2], len(addresses)) for i in range(0, RUN, 2)]
    for address, words in zip(addresses, zip(*pairs, strict=True), strict=True):
        address.cast(u32).store_run(0, words)
