"""Small kernels of every family with operands and expected results.

Tests and tools perturb and mutate them.

To add one, write a function that returns a Subject and give it a label in SUBJECTS. Shapes should
be small (a run takes milliseconds) but reach every branch of the text: tails, masks, several warps
and blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from ptx_kernels.kernels.attention import (
    CausalAttentionConfig,
    MergeConfig,
    PagedAttentionConfig,
)
from ptx_kernels.kernels.gated_delta import GatedDeltaRuleConfig, GatedDeltaStepConfig
from ptx_kernels.kernels.gemm import GemmConfig
from ptx_kernels.kernels.matvec import PRESETS, MatvecConfig
from ptx_kernels.ptx.oldest import COMMON, built_for
from support.format_lists import PRODUCTS

from .attention import (
    attention_subject,
    causal_subject,
    merge_subject,
    piece_subject,
    split_subject,
)
from .base import Subject
from .deltas import delta_rule_subject, delta_step_subject
from .experts import (
    expert_gated_subject,
    expert_gemm_subject,
    expert_matvec_subject,
    mixture_subject,
    route_subject,
    routed_gated_subject,
    router_subject,
)
from .pages import append_subject, latent_rope_subject, rope_subject
from .products import (
    append_heads_subject,
    fused_matvec_subject,
    gated_gemm_subject,
    gated_subject,
    gemm_epilogue_subject,
    gemm_subject,
    matvec_subject,
    preset_subject,
    qkv_gemm_subject,
    qkv_subject,
)
from .rows import (
    decode_subject,
    embedding_subject,
    f16_rows_subject,
    quantize_f16_subject,
    quantize_subject,
    rms_norm_subject,
    scaled_decode_subject,
)
from .search import (
    argmax_of_candidates_subject,
    argmax_subject,
    top_k_of_candidates_subject,
    top_k_subject,
)

_HEAD_DIMS = {"f32": 64, "f16": 128, "bf16": 96, "int8": 48, "fp8": 32}


SUBJECTS: dict[str, Callable[[], Subject]] = {
    **{f"quantize-{t}": functools.partial(quantize_subject, t) for t in ("f32", "f16", "bf16")},
    **{
        f"quantize_f16-{t}": functools.partial(quantize_f16_subject, t)
        for t in ("f32", "f16", "bf16")
    },
    **{
        f"f16_rows-{source}": functools.partial(f16_rows_subject, source)
        for source in ("f32", "norm", "silu")
    },
    "decode-scaled": functools.partial(scaled_decode_subject, "Q4_K"),
    **{f"rms_norm-{o}": functools.partial(rms_norm_subject, o) for o in ("f32", "q8_1")},
    "rms_norm-residual": functools.partial(rms_norm_subject, "f32", residual=True),
    **{
        f"matvec-{name}": functools.partial(preset_subject, config)
        for name, config in PRESETS.items()
    },
    **{
        f"matvec-{f}-{lanes}": functools.partial(
            matvec_subject, f, MatvecConfig(lanes=lanes, rows_per_warp=2)
        )
        for f, lanes in (("Q4_K", 4), ("Q5_K", 8), ("Q6_K", 4), ("Q6_K", 32))
    },
    "matvec-persistent": functools.partial(
        matvec_subject, "Q4_K", replace(PRESETS["dp4a"], persistent=2, warps=2), n=11, columns=256
    ),
    "fused-f32": functools.partial(
        fused_matvec_subject, replace(PRESETS["tiled"], warps=2, persistent=2)
    ),
    "fused-q8_1": functools.partial(
        fused_matvec_subject, replace(PRESETS["inline_q8"], warps=16), "q8_1"
    ),
    "chunked-rest": functools.partial(
        matvec_subject, "Q4_K", replace(PRESETS["chunked"], warps=2, rows_per_warp=2), n=3, m=8
    ),
    "gated-silu": functools.partial(
        gated_subject, replace(PRESETS["multi_warp_dp4a"], persistent=2), "silu"
    ),
    "gated-gelu": functools.partial(gated_subject, PRESETS["batched"], "gelu", ("Q5_K", "Q6_K")),
    "qkv": functools.partial(qkv_subject, PRESETS["inline_q8"]),
    "expert-matvec": functools.partial(
        expert_matvec_subject, replace(PRESETS["inline_q8"], warps=2, persistent=2)
    ),
    "expert-gated": functools.partial(
        expert_gated_subject,
        replace(PRESETS["inline_q8"], rows_per_warp=4, resident_blocks=2),
        "swiglu_oai",
        "q8_1",
    ),
    "mixture": functools.partial(mixture_subject, PRESETS["quarter_warp_dp4a"], columns=1280),
    "mixture-f32": functools.partial(
        mixture_subject,
        replace(PRESETS["fused_f32"], rows_per_warp=2, warps_per_row=2),
        "Q6_K",
        columns=1280,
    ),
    "mixture-shared": functools.partial(
        mixture_subject, PRESETS["quarter_warp_dp4a"], columns=1280, shared=True
    ),
    "expert-gemm": functools.partial(expert_gemm_subject, GemmConfig(1, 2, 1, 16, 3)),
    "routed-gated": functools.partial(
        routed_gated_subject,
        replace(PRESETS["inline_q8"], rows_per_warp=4, resident_blocks=2),
        "softmax",
        "q8_1",
    ),
    "routed-gated-shared": functools.partial(
        routed_gated_subject,
        replace(PRESETS["inline_q8"], rows_per_warp=4, resident_blocks=2),
        "sigmoid",
        shared=True,
        gated_by=True,
    ),
    "router": functools.partial(router_subject, 3, 1284, rows=(4, 1), biases=True),
    "route-softmax": functools.partial(route_subject, "softmax"),
    "route-normalized": functools.partial(route_subject, "softmax", normalize=True),
    "route-sigmoid": functools.partial(route_subject, "sigmoid", top=5),
    "gemm-Q4_K": functools.partial(gemm_subject, "Q4_K", GemmConfig(1, 2, 1, 16, 2), columns=1280),
    "gemm-Q4_K-m8": functools.partial(
        gemm_subject, "Q4_K", GemmConfig(1, 2, 1, 8, 3), m=7, columns=2048
    ),
    "gemm-epilogue": functools.partial(gemm_epilogue_subject, GemmConfig(1, 2, 1, 8, 2)),
    "gemm-split": functools.partial(gemm_epilogue_subject, GemmConfig(1, 1, 1, 8, 2, splits=2)),
    "gated_gemm": functools.partial(gated_gemm_subject, GemmConfig(2, 2, 2, 8, 2)),
    "qkv_gemm": functools.partial(qkv_gemm_subject, GemmConfig(2, 1, 1, 8, 2)),
    "gemm-Q5_K": functools.partial(gemm_subject, "Q5_K", GemmConfig(2, 1, 1, 16, 2), n=33),
    "gemm-Q5_1": functools.partial(
        gemm_subject, "Q5_1", GemmConfig(1, 1, 1, 16, 2), n=15, columns=704, m=15
    ),
    "gemm-MXFP4": functools.partial(
        gemm_subject, "MXFP4", GemmConfig(1, 1, 1, 16, 2), n=15, columns=704, m=15
    ),
    "gemm-Q6_K": functools.partial(
        gemm_subject, "Q6_K", GemmConfig(1, 4, 1, 16, 2), n=17, columns=2304
    ),
    "gemm-f16-Q4_K": functools.partial(
        gemm_subject, "Q4_K", GemmConfig(1, 1, 2, 16, 3, "f16"), n=29
    ),
    "gemm-f16-Q5_K": functools.partial(
        gemm_subject, "Q5_K", GemmConfig(2, 1, 1, 16, 2, "f16"), n=33
    ),
    "gemm-f16-Q6_K": functools.partial(
        gemm_subject, "Q6_K", GemmConfig(1, 1, 1, 32, 2, "f16"), n=15
    ),
    **{
        f"decode-{f}": functools.partial(decode_subject, f)
        for f in (*PRODUCTS, "IQ1_M", "IQ2_S", "IQ3_XXS", "NVFP4", "TQ1_0")
    },
    "decode-bf16": functools.partial(decode_subject, "Q6_K", "bf16"),
    "embedding": embedding_subject,
    **{f"append-{t}": functools.partial(append_subject, t) for t in ("f32", "bf16", "int8", "fp8")},
    **{
        f"append-latent-{t}": functools.partial(append_subject, t, latent=True)
        for t in ("f16", "int8")
    },
    "qkv_append-neighbours": functools.partial(append_heads_subject, True),
    "qkv_append-halves": functools.partial(append_heads_subject, False),
    "rope_append-interleaved": functools.partial(rope_subject, True, False),
    "rope_append-norm": functools.partial(rope_subject, False, True),
    "rope_append-int8": functools.partial(rope_subject, True, True, "int8"),
    "rope_append-rest": functools.partial(rope_subject, False, True, q_rest=50, v_eps=0.5),
    "rope_append-latent": functools.partial(latent_rope_subject, False),
    "rope_append-latent-int8": functools.partial(latent_rope_subject, True, "int8"),
    **{f"attention-{t}": functools.partial(attention_subject, d, t) for t, d in _HEAD_DIMS.items()},
    **{
        f"attention-tensor_cores-{dtype}": functools.partial(
            attention_subject,
            head_dim,
            dtype,
            PagedAttentionConfig(warps=2, queries=3, tensor_cores=True),
            tolerance=5e-12,
            context=context,  # the last token is at another position of a lane's four
        )
        for dtype, head_dim, context in (
            ("bf16", 64, 43),
            ("f16", 32, 42),
            ("int8", 48, 40),
            ("fp8", 32, 37),
        )
    },
    "attention-tensor_cores-steep": functools.partial(
        attention_subject,
        32,
        "f16",
        PagedAttentionConfig(warps=1, queries=3, splits=2, tensor_cores=True),
        tolerance=5e-12,
        q_size=40.0,
        window=40,
        sinks=True,
    ),
    "attention-one_warp": functools.partial(
        attention_subject, 128, "f16", PagedAttentionConfig(warps=1, unroll=1)
    ),
    "attention-contiguous": functools.partial(
        attention_subject, contiguous=True, window=20, sinks=True
    ),
    "attention-soft_cap": functools.partial(attention_subject, 32, soft_cap=1.5, window=9),
    "attention-splits": functools.partial(
        attention_subject, config=PagedAttentionConfig(warps=1, splits=3, unroll=1), sinks=True
    ),
    "attention-cluster": functools.partial(
        attention_subject,
        48,
        config=PagedAttentionConfig(warps=2, splits=3, unroll=1, cluster=True),
        sinks=True,
    ),
    "attention-cluster-q8_1": functools.partial(
        attention_subject,
        64,
        "bf16",
        PagedAttentionConfig(warps=2, queries=3, splits=2, tensor_cores=True, cluster=True),
        output="q8_1",
        tolerance=1e-7,
    ),
    "attention-gate": functools.partial(attention_subject, 48, gate=True),
    "attention-cluster-gate": functools.partial(
        attention_subject,
        80,
        "bf16",
        PagedAttentionConfig(warps=2, queries=2, splits=2, tensor_cores=True, cluster=True),
        gate=True,
        tolerance=5e-12,
    ),
    "attention-steep": functools.partial(attention_subject, q_size=40.0),
    "attention-q8_1": functools.partial(attention_subject, output="q8_1", tolerance=1e-7),
    "attention-wide": functools.partial(
        attention_subject,
        272,
        "bf16",
        PagedAttentionConfig(warps=4, queries=1, teams=2, unroll=1),
    ),
    "attention-latent": functools.partial(
        attention_subject,
        160,
        "bf16",
        PagedAttentionConfig(warps=2, queries=2, teams=2),
        value_dim=96,
    ),
    "attention-latent-int8": functools.partial(
        attention_subject,
        96,
        "int8",
        PagedAttentionConfig(warps=4, queries=2, teams=2, splits=2, unroll=1),
        value_dim=64,
    ),
    "attention-latent-rest": functools.partial(
        attention_subject,
        160,
        "bf16",
        PagedAttentionConfig(warps=2, queries=2, teams=2, splits=2, cluster=True),
        value_dim=96,
        q_rest=True,
    ),
    "merge": functools.partial(merge_subject, MergeConfig(warps=2, unroll=2)),
    "merge-gate": functools.partial(merge_subject, MergeConfig(warps=2, unroll=2), gate=True),
    "split_keys": split_subject,
    "causal_attention": functools.partial(
        causal_subject, CausalAttentionConfig(warps=2, tokens=16)
    ),
    "causal_attention-window": functools.partial(
        causal_subject,
        CausalAttentionConfig(warps=1, tokens=16),
        head_dim=48,
        time=61,
        window=46,  # each of the three loops refills its stages
        soft_cap=2.0,
        sinks=True,
    ),
    "causal_attention-pages": functools.partial(
        piece_subject, CausalAttentionConfig(warps=2, tokens=32), time=12
    ),
    "causal_attention-pages-window": functools.partial(
        piece_subject,
        CausalAttentionConfig(warps=1, tokens=16),
        "f16",
        time=12,
        head_dim=48,
        window=21,
        soft_cap=2.0,
        sinks=True,
        tolerance=1e-12,
    ),
    "causal_attention-pages-split": functools.partial(
        piece_subject,
        CausalAttentionConfig(warps=2, tokens=16, splits=2),
        "f16",
        head_dim=48,
        soft_cap=2.0,
        sinks=True,
        missing=True,
        tolerance=1e-12,
    ),
    "gated_delta_rule": functools.partial(
        delta_rule_subject, GatedDeltaRuleConfig(warps=4, lanes=16, tokens=4), True
    ),
    "gated_delta_rule-grouped": functools.partial(
        delta_rule_subject, GatedDeltaRuleConfig(warps=2, lanes=16, columns=4, tokens=4), False
    ),
    "gated_delta_rule-whole": functools.partial(
        delta_rule_subject, GatedDeltaRuleConfig(warps=2, lanes=4, tokens=4), True, time=12
    ),
    "gated_delta_step": functools.partial(
        delta_step_subject, GatedDeltaStepConfig(warps=2, lanes=4, columns=2), False
    ),
    "gated_delta_step-turns": functools.partial(
        delta_step_subject, GatedDeltaStepConfig(warps=1), True, width=3
    ),
    "gated_delta_step-alone": functools.partial(
        delta_step_subject, GatedDeltaStepConfig(warps=1, lanes=4, columns=4), True, num_v_heads=2
    ),
    "argmax": argmax_subject,
    "argmax-candidates": argmax_of_candidates_subject,
    "top_k": top_k_subject,
    "top_k-candidates": top_k_of_candidates_subject,
}


@functools.cache
def subject(label: str, oldest: int = COMMON) -> Subject:
    """Builds a subject for architecture `oldest`, 80 for sm_80, and newer ones."""
    with built_for(oldest):
        return SUBJECTS[label]()


__all__ = [
    "SUBJECTS",
    "Subject",
    "attention_subject",
    "causal_subject",
    "piece_subject",
    "decode_subject",
    "matvec_subject",
    "quantize_subject",
    "subject",
]
