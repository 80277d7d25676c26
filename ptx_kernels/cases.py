"""The shapes that stand for each kernel family in reports, golden texts and assembly tests.

A section per family, in the order in which a decode step meets them; CASES, last, joins the
sections.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from . import formats, tuning
from .kernels.decode import FORMATS as DECODE_FORMATS
from .kernels.gemm import GemmConfig
from .kernels.matvec import PRESETS, MatvecConfig
from .kernels.rms_norm import RmsNormConfig


@dataclass(frozen=True)
class Case:
    """A kernel at a shape that matters; `label` is unique."""

    label: str
    family: str
    arguments: dict[str, Any]


# --- quantize_q8_1, quantize_f16 ---

QUANTIZE_CASES = tuple(
    Case(f"quantize_q8_1-{dtype}", "quantize_q8_1", dict(rows=1, columns=4096, dtype=dtype))
    for dtype in ("f32", "bf16", "f16")
)

F16_CASES = tuple(
    Case(f"quantize_f16-{dtype}", "quantize_f16", dict(rows=512, columns=4096, dtype=dtype))
    for dtype in ("f32", "bf16", "f16")
)

# --- rms_norm ---


def _norm(output: str, columns: int, warps: int) -> Case:
    arguments = dict(rows=1, columns=columns, eps=1e-5, output=output, config=RmsNormConfig(warps))
    return Case(f"rms_norm-{output}-{columns}", "rms_norm", arguments)


NORM_CASES = (
    _norm("f32", 4096, 8),
    _norm("q8_1", 4096, 8),
    _norm("q8_1", 896, 2),
    _norm("q8_1", 16384, 32),
)

# --- matvec ---


def _matvec(format: str, m: int, n: int = 4096, columns: int = 4096, **config: Any) -> Case:
    name = f"matvec-{format}-{n}x{columns}-m{m}"
    return Case(
        name,
        "matvec",
        dict(format=format, n=n, columns=columns, m=m, config=MatvecConfig(**config)),
    )


MATVEC_CASES = (
    _matvec("Q4_K", 1, rows_per_warp=2, lanes=8, unroll=2, resident_blocks=6),
    _matvec("Q4_K", 1, n=1025, columns=768, lanes=8, unroll=1, resident_blocks=6),
    _matvec("Q4_K", 2, rows_per_warp=2, unroll=1, resident_blocks=5),
    _matvec("Q4_K", 4, rows_per_warp=2, unroll=1, resident_blocks=3),
    _matvec("Q4_K", 8, rows_per_warp=2, unroll=1, resident_blocks=3),
    _matvec("Q5_K", 1, rows_per_warp=2, lanes=8, unroll=2, resident_blocks=6),
    _matvec("Q5_K", 1, n=1025, columns=768, lanes=8, unroll=1, resident_blocks=6),
    _matvec("Q5_K", 2, rows_per_warp=2, unroll=1, resident_blocks=4),
    _matvec("Q5_K", 4, rows_per_warp=2, unroll=1, resident_blocks=3),
    _matvec("Q5_K", 8, rows_per_warp=2, unroll=1, resident_blocks=3),
    _matvec("Q6_K", 1, columns=14336, rows_per_warp=2, unroll=2, resident_blocks=5),
    _matvec("Q6_K", 1, n=1025, columns=768, unroll=1, resident_blocks=5),
    _matvec("Q6_K", 2, columns=14336, rows_per_warp=2, unroll=1, resident_blocks=5),
    _matvec("Q6_K", 4, columns=14336, rows_per_warp=2, unroll=1, resident_blocks=3),
    _matvec("Q6_K", 8, columns=14336, rows_per_warp=2, unroll=1, resident_blocks=3),
    *(
        _matvec(
            format,
            m,
            n=4864,
            columns=896,
            rows_per_warp=2,
            lanes=lanes,
            unroll=unroll,
            resident_blocks=resident,
        )
        for format, wide in (("Q8_0", 16), ("Q5_0", 8), ("Q4_0", 8), ("Q5_1", 8))
        for m, lanes, unroll, resident in ((1, wide, 2, 5), (4, 8, 1, 3))
    ),
)

#: (n, columns) of Llama-3.1-8B's matrices: attention query and output, gate and up, down, output head.
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096))


def preset_cases(preset: str, format: str = "Q4_K") -> tuple[Case, ...]:
    """A strategy of the mat-vec at `SHAPES`: one row of activations, four for `batched`. Not among CASES."""
    m = 4 if preset == "batched" else 1
    return tuple(
        Case(
            f"{preset}-{format}-{n}x{columns}-m{m}",
            "matvec",
            dict(format=format, n=n, columns=columns, m=m, config=PRESETS[preset]),
        )
        for n, columns in SHAPES
    )


# --- gemm ---


def _gemm(
    format: str,
    m: int,
    n: int,
    columns: int,
    row_warps: int,
    column_warps: int,
    tiles: int,
    m_tile: int,
    stages: int,
    products: str = "int8",
) -> Case:
    config = GemmConfig(row_warps, column_warps, tiles, m_tile, stages, products)
    label = f"gemm-{format}-{n}x{columns}-m{m}{'' if products == 'int8' else '-' + products}"
    return Case(label, "gemm", dict(format=format, n=n, columns=columns, m=m, config=config))


GEMM_CASES = (
    _gemm("Q4_K", 16, 4096, 4096, 1, 4, 1, 16, 4),
    _gemm("Q4_K", 64, 4096, 4096, 2, 2, 1, 64, 2),
    _gemm("Q4_K", 512, 14336, 4096, 4, 1, 2, 64, 2),
    _gemm("Q5_K", 128, 14336, 4096, 4, 1, 2, 64, 2),
    _gemm("Q6_K", 16, 4096, 14336, 1, 4, 1, 16, 4),
    _gemm("Q6_K", 128, 4096, 14336, 4, 1, 1, 64, 2),
    _gemm("Q6_K", 37, 5, 3 * 256, 2, 2, 1, 48, 2),  # rows cut short, an odd number of f16 in all
    _gemm("Q8_0", 64, 4864, 896, 4, 1, 1, 64, 2),
    _gemm("Q5_0", 64, 4864, 896, 4, 1, 2, 64, 2),
    _gemm("Q5_1", 16, 896, 4864, 1, 4, 1, 16, 4),
    _gemm("Q4_0", 64, 4864, 896, 4, 1, 2, 64, 2),
    _gemm("Q4_K", 512, 14336, 4096, 8, 1, 2, 64, 2, "f16"),
    _gemm("Q5_K", 512, 14336, 4096, 8, 1, 2, 48, 2, "f16"),
    _gemm("Q6_K", 512, 4096, 14336, 8, 1, 2, 64, 2, "f16"),
)

# --- matvec with prologues and epilogues, gated_matvec, qkv_matvec ---


def _fused(
    label: str, family: str, preset: str, changes: dict[str, Any] | None = None, **arguments: Any
) -> Case:
    config = replace(PRESETS[preset], **(changes or {}))
    arguments = {"columns": 4096, "m": 1, **arguments}
    return Case(f"{family}-{label}-m{arguments['m']}", family, dict(**arguments, config=config))


_Q4: dict[str, Any] = dict(format="Q4_K", n=4096)
_DOWN: dict[str, Any] = dict(bias=True, residual=True, **_Q4)
_PAIR: dict[str, Any] = dict(formats=("Q4_K", "Q4_K"), n=14336)
_QKV: dict[str, Any] = dict(formats=("Q4_K", "Q4_K", "Q6_K"), rows=(4096, 1024, 1024))
_GROUPS: dict[str, Any] = dict(warps=16, resident_blocks=2, unroll=1)  # 32 rows a block
FUSED_CASES = (
    _fused("tiled-norm", "matvec", "tiled", norm=True, eps=1e-5, **_Q4),
    _fused("tiled", "matvec", "tiled", dict(rows_per_warp=2), m=4, **_Q4),
    _fused("chunked", "matvec", "chunked", columns=18944, **_Q4),
    _fused("chunked", "matvec", "chunked", dict(rows_per_warp=1), m=8, columns=27648, **_Q4),
    _fused(
        "inline_q8-norm", "matvec", "inline_q8", dict(persistent=264), norm=True, eps=1e-5, **_Q4
    ),
    _fused("inline_q8", "matvec", "inline_q8", dict(resident_blocks=2), m=8, **_DOWN),
    _fused("residual", "matvec", "quarter_warp_dp4a", dict(resident_blocks=5), **_DOWN),
    _fused(
        "q8_1-output",
        "matvec",
        "batched",
        {**_GROUPS, "resident_blocks": 1, "lanes": 8},
        m=4,
        output="q8_1",
        **_Q4,
    ),
    _fused("dp4a", "gated_matvec", "quarter_warp_dp4a", dict(resident_blocks=5), **_PAIR),
    _fused("dp4a", "gated_matvec", "batched", dict(resident_blocks=2), m=8, **_PAIR),
    _fused("q8_1-output", "gated_matvec", "quarter_warp_dp4a", _GROUPS, output="q8_1", **_PAIR),
    _fused(
        "norm-q8_1-output",
        "gated_matvec",
        "inline_q8",
        _GROUPS,
        norm=True,
        eps=1e-5,
        output="q8_1",
        **_PAIR,
    ),
    _fused(
        "Q4_K-Q6_K",
        "gated_matvec",
        "batched",
        m=4,
        activation="gelu",
        formats=("Q4_K", "Q6_K"),
        n=14336,
    ),
    _fused("dp4a", "qkv_matvec", "quarter_warp_dp4a", dict(resident_blocks=5), **_QKV),
    _fused("dp4a", "qkv_matvec", "batched", m=8, **_QKV),
    _fused("norm", "qkv_matvec", "inline_q8", norm=True, eps=1e-5, biases=True, **_QKV),
)

# --- decode ---


def _decode(format: str, dtype: str, lookups: int) -> Case:
    blocks = 4096 // formats.get(format).block_size
    label = f"{'embedding' if lookups else 'decode'}-{format}-{dtype}"
    return Case(
        label, "decode", dict(format=format, n=4096, blocks=blocks, dtype=dtype, lookups=lookups)
    )


DECODE_CASES = tuple(
    _decode(format, dtype, lookups)
    for format in DECODE_FORMATS
    for dtype in ("f32", "bf16", "f16")
    for lookups in (0, 8)
)

# --- append_kv ---

APPEND_CASES = tuple(
    Case(
        f"append_kv-{dtype}",
        "append_kv",
        dict(tokens=4, num_pages=1024, num_kv_heads=8, page_size=16, head_dim=128, dtype=dtype),
    )
    for dtype in ("f32", "bf16", "f16", "int8", "fp8")
)

# --- rope_append ---


def _rope_append(label: str, dtype: str, head_dim: int, rope_dim: int, **variant: Any) -> Case:
    sizes = dict(tokens=4, num_heads=32, num_kv_heads=8, num_pages=1024, page_size=16, eps=1e-6)
    shape = dict(head_dim=head_dim, rope_dim=rope_dim, dtype=dtype)
    return Case(f"rope_append-{label}", "rope_append", sizes | shape | variant)


ROPE_CASES = (
    _rope_append("llama-f32", "f32", 128, 128, interleaved=True),
    _rope_append("qwen3-bf16", "bf16", 128, 128, interleaved=False, qk_norm=True),
    _rope_append("partial-f16", "f16", 96, 40, interleaved=False),
    _rope_append("qwen3-int8", "int8", 128, 128, interleaved=False, qk_norm=True),
    _rope_append("llama-fp8", "fp8", 128, 128, interleaved=True),
)

# --- paged_attention, merge_attention ---


def _attention(
    dtype: str, head_dim: int, group: int, *, label: str = "", splits: int = 1, **options: Any
) -> Case:
    """As `tuning` has it for a device that `splits` blocks per sequence and head fill."""
    contiguous = options.get("contiguous", False)
    config = replace(
        tuning.paged_attention.rule(4, 8 * group, 8, head_dim, 4096, dtype), splits=splits
    )
    return Case(
        f"paged_attention-{dtype}-d{head_dim}-g{group}{label}",
        "paged_attention",
        dict(
            batch=4,
            num_heads=group * 8,
            num_kv_heads=8,
            head_dim=head_dim,
            num_pages=4 if contiguous else 1024,
            page_size=4096 if contiguous else 16,
            pages_per_sequence=1 if contiguous else 256,
            scale=head_dim**-0.5,
            dtype=dtype,
            config=config,
            **options,
        ),
    )


def _merge(name: str, head_dim: int, **options: Any) -> Case:
    config = tuning.merge_attention.rule(head_dim, 33)
    arguments = dict(batch=1, num_heads=32, head_dim=head_dim, splits=33, config=config)
    return Case(f"merge_attention-{name}", "merge_attention", arguments | options)


ATTENTION_CASES = (
    *(_attention("bf16", head_dim, 4) for head_dim in (128, 32, 64, 80, 96, 112, 256)),
    *(
        _attention(dtype, head_dim, 4)
        for dtype in ("f32", "int8", "fp8")
        for head_dim in (64, 128, 256)
    ),
    *(_attention("bf16", 128, group) for group in (1, 2, 7, 8)),
    _attention("f16", 128, 4),
    _attention("f32", 80, 1),
    _attention("f32", 256, 8),
    _attention("int8", 112, 7),
    _attention("int8", 128, 8),
    _attention("fp8", 256, 8),
    _attention("bf16", 128, 4, label="-split", splits=16),
    _attention("bf16", 128, 4, label="-contiguous", contiguous=True),
    _attention("bf16", 256, 2, label="-window-soft_cap", window=4096, soft_cap=50.0),
    _attention("bf16", 64, 8, label="-window-sinks", window=128, sinks=True),
    _attention("bf16", 128, 4, label="-q8_1", output="q8_1"),
    _merge("f32", 128),
    _merge("q8_1", 128, output="q8_1"),
    _merge("d80", 80),
)

# --- sampling ---


def _search(family: str, columns: int, splits: int, **arguments: int) -> tuple[Case, Case]:
    """Both launches of a search over a vocabulary."""
    found = splits * arguments.get("count", 1)
    return (
        Case(
            f"{family}-{columns}", family, dict(rows=1, columns=columns, splits=splits, **arguments)
        ),
        Case(
            f"{family}-{columns}-merge",
            family,
            dict(rows=1, columns=found, from_candidates=True, **arguments),
        ),
    )


SAMPLING_CASES = (*_search("argmax", 128256, 128), *_search("top_k", 262144, 64, count=64))

# --- all ---

CASES: tuple[Case, ...] = (
    *QUANTIZE_CASES,
    *F16_CASES,
    *NORM_CASES,
    *MATVEC_CASES,
    *GEMM_CASES,
    *FUSED_CASES,
    *DECODE_CASES,
    *APPEND_CASES,
    *ROPE_CASES,
    *ATTENTION_CASES,
    *SAMPLING_CASES,
)
