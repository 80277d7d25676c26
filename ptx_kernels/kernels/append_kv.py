"""New keys and values into the pages of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from ..ptx import Builder, f32, kernel, s32, u32
from .vectors import float_type, load_floats, store_floats

_RUN = 4  # values a thread moves of k and of v: 16 bytes of f32


@dataclass(frozen=True)
class AppendConfig:
    warps: int = 4  # per block


@kernel
def append_kv(
    k: Builder,
    *,
    tokens: int,
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: str = "f32",
    config: AppendConfig = AppendConfig(),
) -> None:
    """pages[slot / page_size, :, slot % page_size] = new[token] for k and v; a slot outside the pages is skipped."""
    storage = float_type(dtype)
    pages = (num_pages, num_kv_heads, page_size, head_dim)
    new = (tokens, num_kv_heads, head_dim)
    k_pages = k.inout("k_pages", storage, pages)
    v_pages = k.inout("v_pages", storage, pages)
    k_new = k.input("k", f32, new)
    v_new = k.input("v", f32, new)
    slot_mapping = k.input("slot_mapping", s32, (tokens,))
    threads = 32 * config.warps
    runs = num_kv_heads * head_dim // _RUN  # of a token
    k.launch((-(-tokens * runs // threads),), threads)

    unit = k.block_id() * threads + k.thread_id
    with k.when(unit < tokens * runs):
        token, run = unit // runs, unit % runs
        head, dim = run // (head_dim // _RUN), (run % (head_dim // _RUN)) * _RUN
        slot = slot_mapping.at(token).load().bits(u32)  # a negative slot is a huge u32
        with k.when(slot < min(num_pages * page_size, 1 << 31)):
            for source, target in ((k_new, k_pages), (v_new, v_pages)):
                values = load_floats(source.at(token, head, dim), _RUN)
                store_floats(target.at(slot // page_size, head, slot % page_size, dim), values)
