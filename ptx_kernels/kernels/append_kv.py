"""New keys and values into the pages of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from ..ptx import WARP, Builder, f32, kernel, s32, u32
from .family import Case, Family, once
from .pages import PAGE_OPERANDS, SLOT_OPERANDS, Spread, declare_pages, touched_slots
from .vectors import RUN


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
    """pages[slot / page_size, :, slot % page_size] = new[token] for k and v.

    A slot outside the pages is skipped. Lanes share a head's vector, 16 bytes of f32 each; how it
    is stored is `Pages.store`.
    """
    k_pages, v_pages = declare_pages(k.inout, dtype, (num_pages, num_kv_heads, page_size, head_dim))
    k_new = k.input("k", f32, (tokens, num_kv_heads, head_dim))
    v_new = k.input("v", f32, (tokens, num_kv_heads, head_dim))
    slot_mapping = k.input("slot_mapping", s32, (tokens,))
    spread = Spread(k, head_dim, RUN)
    vectors, at_once = tokens * num_kv_heads, config.warps * WARP // spread.lanes
    k.launch((-(-vectors // at_once),), WARP * config.warps)

    vector = k.block_id() * at_once + k.thread_id // spread.lanes
    token, head = vector // num_kv_heads, vector % num_kv_heads
    known = vector < vectors
    slot = slot_mapping.at(token).load(where=known).bits(u32)  # a negative slot is a huge u32
    known = known & (slot < min(num_pages * page_size, 1 << 31))
    for source, target in ((k_new, k_pages), (v_new, v_pages)):
        values = spread.load(source.at(token, head), known)
        target.store(
            k,
            (slot // page_size, head, slot % page_size),
            spread.runs(values),
            lanes=spread.lanes,
            where=known,
        )


APPEND_KV = Family(
    "append_kv",
    append_kv,
    tuple(
        Case(
            f"append_kv-{dtype}",
            "append_kv",
            dict(tokens=4, num_pages=1024, num_kv_heads=8, page_size=16, head_dim=128, dtype=dtype),
        )
        for dtype in ("f32", "bf16", "f16", "int8", "fp8")
    ),
    touched=touched_slots,
    passes=once,
    operands=PAGE_OPERANDS | SLOT_OPERANDS,
)
