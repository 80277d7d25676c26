"""Kernel that appends new keys and values to the pages of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    latent: bool = False,
    config: AppendConfig = AppendConfig(),
) -> None:
    """Kernel: writes each token's k and v into its slot of the KV cache; if latent, only k.

    pages[slot / page_size, :, slot % page_size] = new[token]. A slot outside the pages is skipped.
    The lanes of a warp share a head's vector, 16 bytes of f32 per lane; see `Pages.store` for the
    storage format.
    """
    shape = num_pages, num_kv_heads, page_size, head_dim
    pages = declare_pages(k.inout, dtype, shape, latent=latent)
    new = [k.input(name, f32, (tokens, num_kv_heads, head_dim)) for name in "kv"[: len(pages)]]
    slot_mapping = k.input("slot_mapping", s32, (tokens,))
    spread = Spread.in_runs(k, head_dim, RUN)
    vectors, at_once = tokens * num_kv_heads, config.warps * WARP // spread.lanes
    k.launch((-(-vectors // at_once),), WARP * config.warps)

    vector = k.block_id() * at_once + k.thread_id // spread.lanes
    token, head = vector // num_kv_heads, vector % num_kv_heads
    known = vector < vectors
    slot = slot_mapping.at(token).load(where=known).bits(u32)  # a negative slot is a huge u32
    known = known & (slot < min(num_pages * page_size, 1 << 31))
    for source, target in zip(new, pages, strict=True):
        values = spread.load(source.at(token, head), known)
        target.store(
            k,
            (slot // page_size, head, slot % page_size),
            spread.runs(values),
            lanes=spread.lanes,
            where=known,
        )


def _case(label: str, dtype: str, num_kv_heads: int, head_dim: int, **options: Any) -> Case:
    sizes = dict(tokens=4, num_pages=1024, num_kv_heads=num_kv_heads, page_size=16)
    shape = dict(head_dim=head_dim, dtype=dtype)
    return Case.of(append_kv, label, **sizes, **shape, **options)


APPEND_KV = Family(
    append_kv,
    (
        *(_case(dtype, dtype, 8, 128) for dtype in ("f32", "bf16", "f16", "int8", "fp8")),
        _case("bf16-d512", "bf16", 4, 512),
        *(_case(f"{t}-latent", t, 1, 576, latent=True) for t in ("bf16", "int8")),
    ),
    touched=touched_slots,
    passes=once,
    operands=PAGE_OPERANDS | SLOT_OPERANDS,
)
