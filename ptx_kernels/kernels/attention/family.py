"""Attention kernel families: decode over pages, merge of splits, prompts, and splitting of keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...devices import target
from ...ptx import Buffer
from ..family import Arguments, Case, Family, RandomValues, once
from ..gemm.fragments import TILE_ROWS
from ..pages import PAGE_BUFFERS, PAGE_OPERANDS
from .causal_attention import causal_attention
from .merge_attention import merge_attention
from .paged_attention import paged_attention
from .rules import (
    causal_attention_rule,
    merge_attention_rule,
    paged_attention_rule,
    piece_attention_rule,
    round_tokens,
)
from .split_keys import split_keys
from .step_rows import STEP


def _attention(
    dtype: str,
    head_dim: int,
    group: int,
    *,
    label: str = "",
    splits: int = 1,
    num_kv_heads: int = 8,
    value_dim: int | None = None,
    cluster: bool = False,
    **options: Any,
) -> Case:
    """Returns a decode attention case with the rule's Config, but `splits` splits.

    The splits form a cluster if `cluster`.
    """
    contiguous = options.get("contiguous", False)
    heads = num_kv_heads * group, num_kv_heads, head_dim
    chosen = paged_attention_rule(target(), 4, *heads, 4096, dtype, value_dim)
    return Case.of(
        paged_attention,
        f"{dtype}-d{head_dim}-g{group}{label}",
        batch=4,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        num_pages=4 if contiguous else 1024,
        page_size=4096 if contiguous else 16,
        pages_per_sequence=1 if contiguous else 256,
        scale=head_dim**-0.5,
        dtype=dtype,
        config=replace(chosen, splits=splits, cluster=cluster),
        **options,
    )


def _latent(
    dtype: str,
    group: int,
    *,
    label: str = "",
    splits: int = 64,
    cluster: bool = False,
    **more: Any,
) -> Case:
    """Returns a decode attention case with latent rows of 576, of which 512 are values.

    DeepSeek-V2 has this shape.
    """
    options: dict[str, Any] = {"label": f"-latent{label}", "splits": splits, "cluster": cluster}
    return _attention(dtype, 576, group, num_kv_heads=1, value_dim=512, **options, **more)


def _merge(name: str, head_dim: int, **options: Any) -> Case:
    config = merge_attention_rule(target(), head_dim, 33)
    sizes: dict[str, Any] = dict(batch=1, num_heads=32, head_dim=head_dim, splits=33)
    return Case.of(merge_attention, name, **sizes, config=config, **options)


def _causal(
    label: str,
    head_dim: int = 128,
    group: int = 4,
    *,
    batch: int = 1,
    time: int = 512,
    num_kv_heads: int = 8,
    value_dim: int | None = None,
    parts: int = 2,
    key_parts: int = 2,
    dtype: str | None = None,
    seen: int = 0,
    **options: Any,
) -> Case:
    """Returns a case of prompts with the rule's Config, for `seen` tokens of pages of `dtype`."""
    value_dim = value_dim or head_dim
    sizes = batch * num_kv_heads, time * group, head_dim, value_dim, parts, key_parts
    return Case.of(
        causal_attention,
        label,
        batch=batch,
        time=time,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        scale=head_dim**-0.5,
        parts=parts,
        key_parts=key_parts,
        dtype=dtype,
        config=causal_attention_rule(target(), *sizes, dtype, seen),
        **options,
    )


def _piece(
    label: str,
    head_dim: int = 128,
    group: int = 4,
    *,
    batch: int = 1,
    time: int = 256,
    dtype: str = "bf16",
    key_parts: int = 1,
    **options: Any,
) -> Case:
    """Returns a case of prompt chunks that attend to 4096 tokens in pages of 16.

    With `key_parts` above 1 the pages hold bf16 parts written by `split_keys`.
    """
    per_sequence = 4096 // 16
    pages = dict(num_pages=batch * per_sequence, page_size=16, pages_per_sequence=per_sequence)
    return _causal(
        f"pages-{label}",
        head_dim,
        group,
        batch=batch,
        time=time,
        key_parts=key_parts,
        dtype=dtype,
        seen=options.get("window", 4096),
        named_pages=None if key_parts == 1 else batch * per_sequence,
        **pages,
        **options,
    )


_ATTENTIONS = (
    *(_attention("bf16", head_dim, 4) for head_dim in (128, 32, 64, 80, 96, 112, 256)),
    *(
        _attention(dtype, head_dim, 4)
        for dtype in ("f32", "int8", "fp8")
        for head_dim in (64, 128, 256)
    ),
    *(_attention("bf16", 128, group) for group in (1, 2, 7, 8)),
    *(_attention(dtype, 128, 16) for dtype in ("bf16", "int8")),
    _attention("f16", 128, 4),
    _attention("f32", 80, 1),
    _attention("f32", 256, 8),
    _attention("int8", 112, 7),
    _attention("int8", 128, 8),
    _attention("fp8", 256, 8),
    _attention("bf16", 128, 4, label="-split", splits=16),
    _attention("bf16", 128, 4, label="-cluster", splits=8, cluster=True),
    _attention("int8", 128, 4, label="-cluster-q8_1", splits=8, cluster=True, output="q8_1"),
    _attention("f32", 128, 4, label="-cluster", splits=8, cluster=True),
    _attention("bf16", 80, 7, label="-cluster-sinks", splits=5, cluster=True, sinks=True),
    _attention("bf16", 128, 4, label="-contiguous", contiguous=True),
    _attention("bf16", 256, 2, label="-window-soft_cap", window=4096, soft_cap=50.0),
    _attention("bf16", 64, 8, label="-window-sinks", window=128, sinks=True),
    _attention("bf16", 128, 4, label="-q8_1", output="q8_1"),
    _attention("bf16", 128, 4, label="-f16", output="f16"),
    _attention("bf16", 256, 2, label="-f16", output="f16"),
    _attention("int8", 64, 8, label="-cluster-f16", splits=8, cluster=True, output="f16"),
    _attention(
        "bf16", 256, 8, label="-cluster-gate", num_kv_heads=2, splits=8, cluster=True, gate=True
    ),
    *(_attention(dtype, 512, 8, num_kv_heads=4) for dtype in ("bf16", "f32", "int8", "fp8")),
    *(_latent(dtype, 16) for dtype in ("bf16", "f32", "f16", "int8", "fp8")),
    _latent("bf16", 20, splits=33),
    _latent("bf16", 128, splits=8),
    _latent("bf16", 16, label="-whole", splits=1),
    _latent("bf16", 16, label="-cluster", splits=8, cluster=True, q_rest=True),
)

_MERGES = (
    _merge("f32", 128),
    _merge("q8_1", 128, output="q8_1"),
    _merge("f16", 256, output="f16"),
    _merge("d80", 80),
    _merge("d512", 512),
)

_CAUSAL = (
    *(_causal(f"d{head_dim}", head_dim) for head_dim in (128, 32, 64, 80, 96, 112, 192, 256)),
    _causal("4096", time=4096),
    _causal("16", time=16),
    _causal("exact", parts=3, key_parts=3),
    _causal("exact-d192", 192, parts=3, key_parts=3),
    _causal("bf16", parts=1, key_parts=1),
    _causal("bf16-keys", key_parts=1),
    _causal("g1", group=1),
    _causal("g7-b4", group=7, batch=4, num_kv_heads=4),
    _causal("latent", 192, 1, num_kv_heads=16, value_dim=128),
    _causal("window-soft_cap", 256, 2, window=128, soft_cap=50.0),
    _causal("window-sinks", 64, 8, window=128, sinks=True),
    _piece("bf16"),
    _piece("f16", dtype="f16"),
    _piece("f32", key_parts=2),
    _piece("1024", time=1024),
    _piece("16", time=16),
    _piece("d256-window-soft_cap", 256, 2, window=1024, soft_cap=50.0),
    _piece("d64-window-sinks-b4", 64, 8, batch=4, time=64, window=128, sinks=True),
    _piece("f16-d80-g7", 80, 7, num_kv_heads=4, dtype="f16"),
)


def _split(label: str, *, num_kv_heads: int = 8, **options: Any) -> Case:
    sizes = dict(batch=1, time=512, num_kv_heads=num_kv_heads, head_dim=128, value_dim=128)
    return Case.of(split_keys, label, **sizes | options)


_SPLIT_PAGES = dict(num_pages=256, page_size=16, pages_per_sequence=256)
_SPLITS = (
    _split("512"),
    _split("exact", parts=3),
    _split("latent", num_kv_heads=16, head_dim=192),
    _split("pages-f32", dtype="f32", **_SPLIT_PAGES),
    _split("pages-int8", dtype="int8", **_SPLIT_PAGES),
    _split("pages-fp8", dtype="fp8", parts=1, **_SPLIT_PAGES),
)


def _touched(buffer: Buffer, arguments: Arguments) -> float:
    """Returns the fraction of a buffer that is read: of pages, those in block tables and window."""
    if buffer.name not in PAGE_BUFFERS:
        return 1
    held = 1.0
    if not arguments.get("contiguous"):
        held = arguments["batch"] * arguments["pages_per_sequence"] / buffer.shape[0]
    tokens = arguments["pages_per_sequence"] * arguments["page_size"]
    seen = (arguments.get("window") or tokens) + arguments.get("time", 1) - 1
    return held * min(1, seen / tokens)


def _passes(arguments: Arguments) -> int:
    """Returns how often K and V are read: once per `queries` query heads of a group."""
    group = arguments["num_heads"] / arguments["num_kv_heads"]
    return math.ceil(group / arguments["config"].queries)


def _shorter(arguments: Arguments) -> tuple[str, int] | None:
    """Returns (argument, value) for 512 tokens per split; None for a window.

    A window bounds the loop already.
    """
    if arguments["window"] or arguments["contiguous"]:
        return None
    return "pages_per_sequence", math.ceil(
        512 * arguments["config"].splits / arguments["page_size"]
    )


def _trips(arguments: Arguments) -> float:
    """Returns the trips of all warps through the loop over tokens.

    The loop's bytes do not determine them: tensor cores and latent rows take loads of several
    widths, and splits write partial results.
    """
    config, window = arguments["config"], arguments["window"]
    tokens = arguments["pages_per_sequence"] * arguments["page_size"]
    tokens = min(tokens, window or tokens)
    contexts = arguments["batch"] * arguments["num_kv_heads"]
    if config.tensor_cores:
        return contexts * math.ceil(tokens / STEP) * _passes(arguments)
    step = round_tokens(config, arguments["head_dim"], arguments["value_dim"], arguments["dtype"])
    group = arguments["num_heads"] // arguments["num_kv_heads"]
    blocks = contexts * math.ceil(group / (min(config.queries, group) * config.teams))
    share = max(math.ceil(tokens / config.splits), step)
    full, rest = divmod(tokens, share)
    rounds = full * math.ceil(share / step) + math.ceil(rest / step)
    return blocks * config.warps * rounds


def _block_tables(
    buffer: Buffer, buffers: Mapping[str, Buffer], rng: np.random.Generator
) -> np.ndarray:
    """Returns random page ids, without repetition if there are enough pages."""
    num_pages, entries = buffers["k_pages"].shape[0], math.prod(buffer.shape)
    pages = rng.permutation(max(num_pages, entries)) % num_pages
    return pages[:entries].reshape(buffer.shape)


def _context_lens(
    buffer: Buffer, buffers: Mapping[str, Buffer], rng: np.random.Generator
) -> np.ndarray:
    """Returns random context lengths: a full sequence, an empty one, and some between."""
    num_pages, _, page_size, _ = buffers["k_pages"].shape
    tables = buffers.get("block_tables")
    # without block tables the pages are contiguous, one per sequence
    pages = tables.shape[1] if tables is not None else num_pages // buffer.shape[0]
    capacity = page_size * pages
    lengths = rng.integers(1, capacity + 1, buffer.shape)
    lengths[0] = capacity
    lengths[1:2] = 0
    return lengths


def _marks(buffer: Buffer, buffers: Mapping[str, Buffer], rng: np.random.Generator) -> np.ndarray:
    """Returns random `marks` for each split: highest score and positive sum of weights."""
    return np.abs(rng.standard_normal(buffer.shape, np.float32)) + np.float32(1)


_TABLES: dict[str, RandomValues] = {
    "block_tables": _block_tables,
    "context_lens": _context_lens,
}
PAGED_ATTENTION = Family(
    paged_attention,
    _ATTENTIONS,
    rules=(paged_attention_rule,),
    touched=_touched,
    passes=_passes,
    shorter=_shorter,
    trips=_trips,
    operands=PAGE_OPERANDS | _TABLES,
)
MERGE_ATTENTION = Family(
    merge_attention,
    _MERGES,
    rules=(merge_attention_rule,),
    passes=once,
    operands={"marks": _marks},
)


def _lengths(buffer: Buffer, buffers: Mapping[str, Buffer], rng: np.random.Generator) -> np.ndarray:
    """Returns random prompt lengths: a full prompt, an empty one, and some between."""
    time = buffers["q"].shape[1]
    lengths = rng.integers(1, time + 1, buffer.shape)
    lengths[0] = time
    lengths[1:2] = 0
    return lengths


def _before(arguments: Arguments) -> int:
    """Returns how many tokens of a full sequence precede a prompt chunk."""
    return max(0, arguments["pages_per_sequence"] * arguments["page_size"] - arguments["time"])


def _prompt_trips(arguments: Arguments) -> float:
    """Returns the loop trips of all warps over full prompts, or chunks at the end of sequences.

    A tile's trips cover the tokens from the start of its window to its last row.
    """
    time, window, config = arguments["time"], arguments["window"], arguments["config"]
    group, rows = arguments["num_heads"] // arguments["num_kv_heads"], TILE_ROWS * config.warps
    before, steps = _before(arguments), 0
    for first in range(0, time * group, rows):
        stop = before + min((first + rows - 1) // group, time - 1) + 1
        start = max(before + first // group + 1 - window, 0) if window else 0
        steps += math.ceil((stop - start) / config.tokens)
    return arguments["batch"] * arguments["num_kv_heads"] * steps * config.warps


def _shorter_prompt(arguments: Arguments) -> tuple[str, int] | None:
    """Returns (argument, value) for a shorter prompt or context; None for a window.

    The loop's trips grow with the prompt or context.
    """
    if arguments["window"]:
        return None
    if arguments["dtype"] is None:
        return "time", 512
    tokens = 512 * arguments["config"].splits
    return "pages_per_sequence", math.ceil(tokens / arguments["page_size"])


CAUSAL_ATTENTION = Family(
    causal_attention,
    _CAUSAL,
    rules=(causal_attention_rule, piece_attention_rule),
    touched=_touched,
    trips=_prompt_trips,
    shorter=_shorter_prompt,
    operands={"lengths": _lengths, **_TABLES},
)
SPLIT_KEYS = Family(
    split_keys,
    _SPLITS,
    touched=_touched,
    passes=once,
    operands=PAGE_OPERANDS | _TABLES,
)
