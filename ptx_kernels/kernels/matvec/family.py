"""Mat-vec kernel families: one matrix, a gated pair, joined matrices, mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ... import formats
from ...ptx import Buffer, Kernel
from ..family import (
    Arguments,
    Case,
    PackedWeights,
    chosen_experts,
    ids_of_rows,
    joined,
    matmul_family,
    one_layer,
    one_matrix,
    pair,
)
from ..pages import PAGE_BUFFERS, SLOT_OPERANDS, touched_slots
from ..route import Routing
from .config import PRESETS, MatvecConfig
from .gated import gated_matvec
from .matvec import matvec
from .mixture import mixture_matvec
from .qkv import qkv_matvec
from .qkv_append import qkv_append_matvec
from .rules import (
    expert_matvec_rule,
    float_matvec_rule,
    fused_matvec_rule,
    matvec_rule,
    mixture_matvec_rule,
    qkv_append_rule,
)


def _matvec(format: str, m: int, n: int = 4096, columns: int = 4096, **config: Any) -> Case:
    sizes: dict[str, Any] = dict(format=format, n=n, columns=columns, m=m)
    label = f"{format}-{n}x{columns}-m{m}"
    return Case.of(matvec, label, **sizes, config=MatvecConfig(**config))


_PLAIN = (
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
        for format in ("Q8_0", "Q5_0", "Q4_0", "Q4_1", "Q5_1", "IQ4_NL", "MXFP4")
        for m, lanes, unroll, resident in (
            (1, formats.get(format).tuning.gemv_lanes, 2, 5),
            (4, 8, 1, 3),
        )
    ),
)

#: (n, columns) of Llama-3.1-8B's matrices: attention query and output, gate and up, down, output
#: head.
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096))


def preset_cases(preset: str, format: str = "Q4_K") -> tuple[Case, ...]:
    """Returns cases of a preset at `SHAPES`, with one row of activations (four for `batched`).

    CASES does not contain them.
    """
    m = 4 if preset == "batched" else 1
    return tuple(
        Case(
            f"{preset}-{format}-{n}x{columns}-m{m}",
            "matvec",
            dict(format=format, n=n, columns=columns, m=m, config=PRESETS[preset]),
        )
        for n, columns in SHAPES
    )


def _fused(
    label: str,
    build: Callable[..., Kernel],
    preset: str,
    changes: dict[str, Any] | None = None,
    *,
    columns: int = 4096,
    m: int = 1,
    **arguments: Any,
) -> Case:
    config = replace(PRESETS[preset], **(changes or {}))
    return Case.of(build, f"{label}-m{m}", columns=columns, m=m, **arguments, config=config)


_Q4: dict[str, Any] = dict(format="Q4_K", n=4096)
_DOWN: dict[str, Any] = dict(bias=True, residual=True, **_Q4)
_PAIR: dict[str, Any] = dict(formats=("Q4_K", "Q4_K"), n=14336)
_QKV: dict[str, Any] = dict(formats=("Q4_K", "Q4_K", "Q6_K"), rows=(4096, 1024, 1024))
_HEADS: dict[str, Any] = dict(  # those of Llama-3.1-8B
    formats=("Q4_K", "Q4_K", "Q6_K"),
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_dim=128,
    num_pages=1024,
    page_size=16,
)
_GROUPS: dict[str, Any] = dict(warps=16, resident_blocks=2, unroll=1)  # 32 rows per block
_FUSED = (
    _fused("tiled-norm", matvec, "tiled", norm=True, eps=1e-5, **_Q4),
    _fused("tiled", matvec, "tiled", dict(rows_per_warp=2), m=4, **_Q4),
    _fused("chunked", matvec, "chunked", columns=18944, **_Q4),
    _fused("chunked", matvec, "chunked", dict(rows_per_warp=1), m=8, columns=27648, **_Q4),
    _fused("inline_q8-norm", matvec, "inline_q8", dict(persistent=264), norm=True, eps=1e-5, **_Q4),
    _fused("inline_q8", matvec, "inline_q8", dict(resident_blocks=2), m=8, **_DOWN),
    _fused("residual", matvec, "quarter_warp_dp4a", dict(resident_blocks=5), **_DOWN),
    _fused(
        "q8_1-output",
        matvec,
        "batched",
        {**_GROUPS, "resident_blocks": 1, "lanes": 8},
        m=4,
        output="q8_1",
        **_Q4,
    ),
    _fused("dp4a", gated_matvec, "quarter_warp_dp4a", dict(resident_blocks=5), **_PAIR),
    _fused("dp4a", gated_matvec, "batched", dict(resident_blocks=2), m=8, **_PAIR),
    _fused("q8_1-output", gated_matvec, "quarter_warp_dp4a", _GROUPS, output="q8_1", **_PAIR),
    _fused(
        "norm-q8_1-output",
        gated_matvec,
        "inline_q8",
        _GROUPS,
        norm=True,
        eps=1e-5,
        output="q8_1",
        **_PAIR,
    ),
    _fused(
        "Q4_K-Q6_K",
        gated_matvec,
        "batched",
        m=4,
        activation="gelu",
        formats=("Q4_K", "Q6_K"),
        n=14336,
    ),
    _fused("dp4a", qkv_matvec, "quarter_warp_dp4a", dict(resident_blocks=5), **_QKV),
    _fused("dp4a", qkv_matvec, "batched", m=8, **_QKV),
    _fused("norm", qkv_matvec, "inline_q8", norm=True, eps=1e-5, biases=True, **_QKV),
    _fused(
        "norm-bf16",
        qkv_append_matvec,
        "inline_q8",
        norm=True,
        eps=1e-5,
        interleaved=True,
        pages="bf16",
        **_HEADS,
    ),
    _fused(
        "fp8",
        qkv_append_matvec,
        "batched",
        m=4,
        biases=True,
        interleaved=False,
        pages="fp8",
        **_HEADS,
    ),
)


#: Experts of Qwen3-30B-A3B, Qwen3.6-35B-A3B and gpt-oss-20b, by (hidden, inner, experts, top).
_EXPERTS: dict[str, Any] = dict(experts=128, top=8)
_SHARED: dict[str, Any] = dict(experts=256, top=8, shared=True)
_OF_32: dict[str, Any] = dict(experts=32, top=4)
_QWEN: dict[str, Any] = dict(
    columns=2048, norm=True, eps=1e-6, output="q8_1", formats=("Q4_K", "Q4_K")
)
_EIGHT: dict[str, Any] = dict(rows_per_warp=4, unroll=1, resident_blocks=2)  # warps of 4 rows
_MIXTURES = (
    _fused("experts-Q4_K", matvec, "inline_q8", columns=2048, format="Q4_K", n=768, **_EXPERTS),
    _fused(
        "experts-Q4_K",
        gated_matvec,
        "inline_q8",
        _EIGHT,
        **_QWEN,
        n=768,
        **_EXPERTS,
    ),
    _fused(
        "experts-MXFP4",
        gated_matvec,
        "inline_q8",
        _EIGHT,
        columns=2880,
        biases=True,
        output="q8_1",
        activation="swiglu_oai",
        formats=("MXFP4", "MXFP4"),
        n=2880,
        **_OF_32,
    ),
    *(
        _fused(
            format,
            mixture_matvec,
            "quarter_warp_dp4a",
            dict(lanes=lanes, resident_blocks=4),
            m=m,
            columns=768,
            residual=True,
            format=format,
            n=2048,
            **_EXPERTS,
        )
        for format, lanes, m in (("Q4_K", 4, 1), ("Q6_K", 4, 1), ("Q4_K", 4, 8))
    ),
    _fused(
        "MXFP4",
        mixture_matvec,
        "quarter_warp_dp4a",
        dict(resident_blocks=4),
        columns=2880,
        biases=True,
        residual=True,
        format="MXFP4",
        n=2880,
        **_OF_32,
    ),
    _fused(
        "shared-Q4_K",
        gated_matvec,
        "inline_q8",
        _EIGHT,
        **_QWEN,
        n=512,
        routing=Routing(top=8),
        shared_gate=True,
        **_SHARED,
    ),
    _fused(
        "shared-Q6_K",
        mixture_matvec,
        "quarter_warp_dp4a",
        dict(lanes=4, resident_blocks=4),
        columns=512,
        residual=True,
        format="Q6_K",
        n=2048,
        **_SHARED,
    ),
)


_CASES = (*_PLAIN, *_FUSED, *_MIXTURES)


def _of_heads(arguments: Arguments) -> PackedWeights:
    heads = arguments["num_heads"] + 2 * arguments["num_kv_heads"]
    rows = heads * arguments["head_dim"]
    return PackedWeights(arguments["formats"], rows * arguments["columns"])


def _touched_heads(buffer: Buffer, arguments: Arguments) -> float:
    """Returns the fraction of a buffer that is accessed: m slots of pages, else see `one_layer`."""
    if buffer.name in PAGE_BUFFERS:
        return touched_slots(buffer, {**arguments, "tokens": arguments["m"]})
    return one_layer(buffer, arguments)


def _shorter(arguments: Arguments) -> tuple[str, int] | None:
    """Returns ("n", rows that a fixed grid processes in one round); None without a fixed grid."""
    config = arguments["config"]
    return ("n", config.persistent * config.block_rows) if config.persistent else None


#: Facts of a family whose tokens may select experts by `ids`.
_SELECTING: dict[str, Any] = dict(touched=chosen_experts, operands={"ids": ids_of_rows})

MATVEC = matmul_family(
    matvec,
    _CASES,
    *(matvec_rule, fused_matvec_rule, float_matvec_rule, expert_matvec_rule),
    weights=one_matrix,
    shorter=_shorter,
    **_SELECTING,
)
GATED_MATVEC = matmul_family(
    gated_matvec,
    _CASES,
    *(fused_matvec_rule, float_matvec_rule, expert_matvec_rule),
    weights=pair,
    shorter=_shorter,
    **_SELECTING,
)
MIXTURE_MATVEC = matmul_family(
    mixture_matvec, _CASES, mixture_matvec_rule, weights=one_matrix, **_SELECTING
)
QKV_MATVEC = matmul_family(qkv_matvec, _CASES, fused_matvec_rule, float_matvec_rule, weights=joined)
QKV_APPEND_MATVEC = matmul_family(
    qkv_append_matvec,
    _CASES,
    *(qkv_append_rule, float_matvec_rule),
    weights=_of_heads,
    touched=_touched_heads,
    operands=SLOT_OPERANDS,
)
