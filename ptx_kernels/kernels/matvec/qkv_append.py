"""Attention projections in one mat-vec launch that also applies RoPE and appends k, v to pages."""

from __future__ import annotations

from ...ptx import Builder, KernelError, f32, kernel, s32
from ..heads import Heads, Rope
from ..pages import PageSizes, declare_pages
from .config import MatvecConfig
from .epilogue import Epilogue
from .heads import HeadRows, PageRows, Rotation
from .prologue import InputRows, Prologue
from .qkv import SUFFIXES, joined
from .rows import matrix


def takes_heads(head_dim: int, rope_dim: int, interleaved: bool, pages: str) -> bool:
    """Returns whether the fused kernel supports such heads and pages.

    A warp must have both dimensions of every RoPE pair, and pages must have no scales.
    """
    return pages != "int8" and (interleaved or rope_dim == head_dim)


@kernel
def qkv_append_matvec(
    k: Builder,
    *,
    formats: tuple[str, str, str],
    heads: Heads,
    rope: Rope,
    sizes: PageSizes,
    pages: str = "f32",
    x: InputRows,
    biases: bool = False,
    layers: int = 0,
    config: MatvecConfig,
) -> None:
    """Kernel: `qkv_matvec` of the projections q, k and v, then `rope_append` of their results.

    A warp computes both dimensions of each RoPE pair, so it has an even number of rows. Operands:
    the pages, whose dtype `pages` has no scales; the planes of each matrix, activations as in
    `matvec`, slot_mapping, cos, sin, each bias. Results: the pages, q f32 (m, num_heads *
    head_dim).
    """
    head_dim, m, columns = heads.head_dim, x.m, x.columns
    rope.check(head_dim)
    if not takes_heads(head_dim, rope.rope_dim, rope.interleaved, pages):
        raise KernelError(
            f"pages={pages!r} must have no scales, and rope_dim={rope.rope_dim} be "
            f"head_dim={head_dim} unless interleaved: a warp has no whole head"
        )
    if config.rows_per_warp % 2 or head_dim % config.rows_per_warp:
        raise KernelError(
            f"rows_per_warp={config.rows_per_warp} must be even and divide head_dim={head_dim}"
        )
    rows = [n * head_dim for n in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)]
    for format, n in zip(formats, rows, strict=True):
        config.check(format, n, columns, m)
    k.name = f"qkv_append_matvec_{'_'.join(dict.fromkeys(f.lower() for f in formats))}_m{m}"
    stored = declare_pages(k.inout, pages, sizes.shape(heads.num_kv_heads, head_dim))
    parts = [
        matrix(k, f, n, columns, prefix=f"w{s[1:]}_", layers=layers, streamed=config.streamed)
        for f, n, s in zip(formats, rows, SUFFIXES, strict=False)
    ]
    prologue = Prologue(k, x, config)
    slots = k.input("slot_mapping", s32, (m,))
    rotation = Rotation(*rope.input_angles(k, m), rope.interleaved)
    q = k.output("q", f32, (m, rows[0]))
    targets = (
        HeadRows(k, head_dim, rotation, q),
        HeadRows(k, head_dim, rotation, PageRows(stored[0], slots)),
        HeadRows(k, head_dim, None, PageRows(stored[1], slots)),
    )
    epilogues = [
        Epilogue(k, n, m, config, bias=biases, suffix=s, heads=each)
        for n, s, each in zip(rows, SUFFIXES, targets, strict=False)
    ]
    joined(k, config, parts, prologue, epilogues)
