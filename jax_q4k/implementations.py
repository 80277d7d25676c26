"""Names that select an implementation: its kind, its activations, fused operations."""

from __future__ import annotations

from typing import Literal, get_args

Implementation = Literal["ptx", "native", "xla", "sim"]
Activations = Literal["f32", "q8_1"]

IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)
ACTIVATIONS: tuple[str, ...] = get_args(Activations)

#: Operations that can be fused into fewer kernels; for `matmul`, with its bias and residual.
FUSIONS: tuple[str, ...] = (
    "matmul",
    "rms_norm_matmul",
    "qkv_matmul",
    "gated_matmul",
    "mlp",
    "expert_mlp",
    "routed_mlp",
    "rope_append",
    "qkv_rope_append",
    "paged_attention_matmul",
)
