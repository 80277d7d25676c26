"""All kernel families, in the order in which reports list them."""

from __future__ import annotations

from collections.abc import Callable

from ..ptx import Kernel
from .append_kv import APPEND_KV
from .argmax import ARGMAX
from .attention import CAUSAL_ATTENTION, MERGE_ATTENTION, PAGED_ATTENTION, SPLIT_KEYS
from .decode import DECODE
from .f16_rows import F16_ROWS
from .family import Case, Family
from .gated_delta import GATED_DELTA_RULE, GATED_DELTA_STEP
from .gemm import GATED_GEMM, GEMM, QKV_GEMM
from .matvec import GATED_MATVEC, MATVEC, MIXTURE_MATVEC, QKV_APPEND_MATVEC, QKV_MATVEC
from .prefetch import prefetch_rule
from .quantize_f16 import QUANTIZE_F16
from .quantize_q8_1 import QUANTIZE_Q8_1
from .rms_norm import RMS_NORM
from .rope_append import ROPE_APPEND
from .route import ROUTE
from .router import ROUTER
from .top_k import TOP_K

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        QUANTIZE_Q8_1,
        QUANTIZE_F16,
        F16_ROWS,
        RMS_NORM,
        MATVEC,
        GATED_MATVEC,
        QKV_MATVEC,
        QKV_APPEND_MATVEC,
        MIXTURE_MATVEC,
        GEMM,
        GATED_GEMM,
        QKV_GEMM,
        DECODE,
        APPEND_KV,
        ROPE_APPEND,
        PAGED_ATTENTION,
        MERGE_ATTENTION,
        CAUSAL_ATTENTION,
        SPLIT_KEYS,
        GATED_DELTA_RULE,
        GATED_DELTA_STEP,
        ARGMAX,
        TOP_K,
        ROUTER,
        ROUTE,
    )
}
KERNELS: dict[str, Callable[..., Kernel]] = {name: f.build for name, f in FAMILIES.items()}
CASES: tuple[Case, ...] = tuple(case for f in FAMILIES.values() for case in f.examples)

__all__ = ["CASES", "FAMILIES", "KERNELS", "Case", "Family", "prefetch_rule"]
