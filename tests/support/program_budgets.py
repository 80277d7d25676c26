"""Limits for the kernels of Llama 3.1 8B's programs, by program and kind of kernel.

Limits are the current figures, rounded up. An improved kernel tightens its row. A row is loosened
only for a Config that takes less time by the cost model, such as 16 warps for 8, each with fewer
rows.
Each row also has a target for future changes.
"""

from __future__ import annotations

from typing import NamedTuple

from tools.program_kernels import Asked


class Limits(NamedTuple):
    """Limits of one kind of kernel.

    A field is None if the kernel multiplies no packed weights, or copies them.

    Attributes:
      instructions: maximum in the hot loop, per byte of packed quants and lane.
      load_bits: minimum width of the widest load of packed weights per lane.
      conflicts: maximum shared-memory wavefronts, relative to those without bank conflicts.
    """

    instructions: float | None
    load_bits: int | None
    conflicts: float


class Budget(NamedTuple):
    """Limits that hold today, and the target for future changes."""

    instructions: float | None
    load_bits: int | None
    conflicts: float
    target: Limits


#: Minimum distance from a load of weights to its first use, as a fraction of the instructions of a
#: loop iteration, for one row of activations. Half of an iteration hides a load behind the other
#: half.
LOAD_TO_USE = 0.5

#: Minimum distinct weight bytes in flight per multiprocessor in those loops, in KB. The target is
#: 48, nearly twice what memory delivers within its latency. For attention's output a
#: multiprocessor's share is 72 in all, and all warps request half of it at once. Requesting all of
#: it takes longer in both models, since nothing is in flight while the warps compute.
KILOBYTES_AHEAD: dict[str, int] = {
    "qkv_append_matvec_q4_k_m1 6144x4096": 72,
    "matvec_q4_k_m1 4096x4096": 36,
    "gated_matvec_q4_k_m1 14336x4096": 72,
    "matvec_q4_k_m1 4096x14336": 108,
    "qkv_append_matvec_q4_k_q6_k_m1 6144x4096": 68,
    "matvec_q6_k_m1 4096x14336": 52,
    "matvec_q6_k_m1 128256x4096": 52,
}

#: Mat-vecs of one row keep up with memory using half of the issue slots. Activations are stored in
#: the order in which lanes read them.
Q4_K_ONE_ROW = Limits(3.5, 128, 1.1)
Q6_K_ONE_ROW = Limits(4.0, 128, 1.1)
#: Two and three rows read like one; four to eight rows use tensor cores.
FEW_ROWS = Limits(6.5, 128, 1.1)
#: 9 to 64 rows use f16 products with tiles of at least 64 weight rows.
TENSOR_ROWS = Limits(7.5, None, 1.1)
#: As many instructions as tensor cores leave issue slots for.
PROMPT = Limits(7.9, None, 1.1)
SHARED = Limits(None, None, 1.1)  # no product

BUDGETS: dict[Asked, dict[str, Budget]] = {
    Asked("llama-3.1-8b", batch=1): {
        "qkv_append_matvec_q4_k_m1 6144x4096": Budget(2.21, 128, 1.04, Q4_K_ONE_ROW),
        "paged_attention": Budget(None, None, 1.0, SHARED),
        "matvec_q4_k_m1 4096x4096": Budget(2.19, 128, 1.05, Q4_K_ONE_ROW),
        "gated_matvec_q4_k_m1 14336x4096": Budget(2.21, 128, 1.03, Q4_K_ONE_ROW),
        "matvec_q4_k_m1 4096x14336": Budget(2.11, 128, 1.0, Q4_K_ONE_ROW),
        "qkv_append_matvec_q4_k_q6_k_m1 6144x4096": Budget(2.53, 128, 1.04, Q6_K_ONE_ROW),
        "matvec_q6_k_m1 4096x14336": Budget(2.81, 128, 1.0, Q6_K_ONE_ROW),
        "matvec_q6_k_m1 128256x4096": Budget(2.72, 128, 1.01, Q6_K_ONE_ROW),
    },
    Asked("llama-3.1-8b", batch=2): {
        "paged_attention": Budget(None, None, 1.0, SHARED),
        "qkv_append_matvec_q4_k_m2 6144x4096": Budget(2.99, 128, 1.07, FEW_ROWS),
        "matvec_q4_k_m2 4096x4096": Budget(3.11, 128, 1.08, FEW_ROWS),
        "gated_matvec_q4_k_m2 14336x4096": Budget(3.11, 128, 1.02, FEW_ROWS),
        "matvec_q4_k_m2 4096x14336": Budget(3.18, 128, 1.0, FEW_ROWS),
        "qkv_append_matvec_q4_k_q6_k_m2 6144x4096": Budget(3.43, 128, 1.04, FEW_ROWS),
        "matvec_q6_k_m2 4096x14336": Budget(3.39, 128, 1.0, FEW_ROWS),
        "matvec_q6_k_m2 128256x4096": Budget(3.43, 128, 1.01, FEW_ROWS),
    },
    Asked("llama-3.1-8b", batch=3): {
        "paged_attention": Budget(None, None, 1.0, SHARED),
        "qkv_append_matvec_q4_k_m3 6144x4096": Budget(3.97, 128, 1.04, FEW_ROWS),
        "matvec_q4_k_m3 4096x4096": Budget(3.97, 128, 1.08, FEW_ROWS),
        "gated_matvec_q4_k_m3 14336x4096": Budget(3.97, 128, 1.02, FEW_ROWS),
        "matvec_q4_k_m3 4096x14336": Budget(4.0, 128, 1.0, FEW_ROWS),
        "qkv_append_matvec_q4_k_q6_k_m3 6144x4096": Budget(4.14, 128, 1.04, FEW_ROWS),
        "matvec_q6_k_m3 4096x14336": Budget(4.2, 128, 1.0, FEW_ROWS),
        "matvec_q6_k_m3 128256x4096": Budget(4.12, 128, 1.01, FEW_ROWS),
    },
    Asked("llama-3.1-8b", batch=4): {
        "rms_norm": Budget(None, None, 1.0, SHARED),
        "qkv_gemm_q4_k_m8 6144x4096": Budget(5.44, None, 1.06, FEW_ROWS),
        "paged_attention": Budget(None, None, 1.0, SHARED),
        "gemm_q4_k_m8 4096x4096": Budget(5.5, None, 1.06, FEW_ROWS),
        "gated_gemm_q4_k_m8 14336x4096": Budget(4.61, None, 1.04, FEW_ROWS),
        "gemm_q4_k_m8 4096x14336": Budget(5.5, None, 1.06, FEW_ROWS),
        "qkv_gemm_q4_k_q6_k_m8 6144x4096": Budget(5.41, None, 1.05, FEW_ROWS),
        "gemm_q6_k_m8 4096x14336": Budget(5.32, None, 1.05, FEW_ROWS),
        "gemm_q6_k_m8 128256x4096": Budget(4.86, None, 1.08, FEW_ROWS),
    },
    Asked("llama-3.1-8b", batch=8): {
        "rms_norm": Budget(None, None, 1.0, SHARED),
        "qkv_gemm_q4_k_m8 6144x4096": Budget(5.38, None, 1.06, FEW_ROWS),
        "paged_attention": Budget(None, None, 1.0, SHARED),
        "gemm_q4_k_m8 4096x4096": Budget(5.41, None, 1.06, FEW_ROWS),
        "gated_gemm_q4_k_m8 14336x4096": Budget(4.58, None, 1.04, FEW_ROWS),
        "gemm_q4_k_m8 4096x14336": Budget(5.41, None, 1.06, FEW_ROWS),
        "qkv_gemm_q4_k_q6_k_m8 6144x4096": Budget(5.36, None, 1.05, FEW_ROWS),
        "gemm_q6_k_m8 4096x14336": Budget(5.25, None, 1.05, FEW_ROWS),
        "gemm_q6_k_m8 128256x4096": Budget(4.84, None, 1.08, FEW_ROWS),
    },
    Asked("llama-3.1-8b", batch=16): {
        "rms_norm": Budget(None, None, 1.0, SHARED),
        "qkv_gemm_q4_k_m16 6144x4096": Budget(7.07, None, 1.07, TENSOR_ROWS),
        "paged_attention": Budget(None, None, 1.0, SHARED),
        "gemm_q4_k_m16 4096x4096": Budget(7.11, None, 1.08, TENSOR_ROWS),
        "gated_gemm_q4_k_m16 14336x4096": Budget(6.25, None, 1.05, TENSOR_ROWS),
        "gemm_q4_k_m16 4096x14336": Budget(7.11, None, 1.09, TENSOR_ROWS),
        "qkv_gemm_q4_k_q6_k_m16 6144x4096": Budget(7.4, None, 1.14, TENSOR_ROWS),
        "gemm_q6_k_m16 4096x14336": Budget(7.46, None, 1.06, TENSOR_ROWS),
        "gemm_q6_k_m16 128256x4096": Budget(6.94, None, 1.05, TENSOR_ROWS),
    },
    Asked("llama-3.1-8b", batch=32): {
        "rms_norm": Budget(None, None, 1.0, SHARED),
        "qkv_gemm_q4_k_f16_m32 6144x4096": Budget(6.66, None, 1.01, TENSOR_ROWS),
        "paged_attention": Budget(None, None, 1.0, SHARED),
        "gemm_q4_k_f16_m32 4096x4096": Budget(8.05, None, 1.02, TENSOR_ROWS),
        "gated_gemm_q4_k_f16_m32 14336x4096": Budget(6.6, None, 1.01, TENSOR_ROWS),
        "gemm_q4_k_f16_m32 4096x14336": Budget(8.05, None, 1.02, TENSOR_ROWS),
        "qkv_gemm_q4_k_q6_k_f16_m32 6144x4096": Budget(6.66, None, 1.01, TENSOR_ROWS),
        "gemm_q6_k_f16_m16 4096x14336": Budget(6.38, None, 1.02, TENSOR_ROWS),
        "gemm_q6_k_f16_m32 128256x4096": Budget(6.15, None, 1.06, TENSOR_ROWS),
    },
    Asked("llama-3.1-8b", prompt=192): {
        "rms_norm": Budget(None, None, 1.0, SHARED),
        "qkv_gemm_q4_k_f16_m64 6144x4096": Budget(7.91, None, 1.01, PROMPT),
        "gemm_q4_k_f16_m64 4096x4096": Budget(7.94, None, 1.02, PROMPT),
        "gated_gemm_q4_k_f16_m64 14336x4096": Budget(7.91, None, 1.02, PROMPT),
        "gemm_q4_k_f16_m64 4096x14336": Budget(7.88, None, 1.01, PROMPT),
        "qkv_gemm_q4_k_q6_k_f16_m64 6144x4096": Budget(7.94, None, 1.01, PROMPT),
        "gemm_q6_k_f16_m64 4096x14336": Budget(7.15, None, 1.04, PROMPT),
        "matvec_q6_k_m1 128256x4096": Budget(2.72, 128, 1.01, Q6_K_ONE_ROW),
        "argmax": Budget(None, None, 1.0, SHARED),
    },
}
