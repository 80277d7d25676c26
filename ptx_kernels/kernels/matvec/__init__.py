"""Mat-vec kernels of packed weights: one design, whose strategies are values of MatvecConfig."""

from __future__ import annotations

from .config import MAX_ROWS, PRESETS, MatvecConfig
from .family import (
    GATED_MATVEC,
    MATVEC,
    MIXTURE_MATVEC,
    QKV_APPEND_MATVEC,
    QKV_MATVEC,
    SHAPES,
    preset_cases,
)
from .gated import gated_matvec
from .matvec import matvec
from .mixture import mixture_matvec
from .qkv import MAX_MATRICES, qkv_matvec
from .qkv_append import qkv_append_matvec, takes_heads
from .rules import (
    expert_matvec_rule,
    float_matvec_rule,
    fused_matvec_rule,
    matvec_rule,
    mixture_matvec_rule,
    qkv_append_rule,
)

__all__ = [
    "GATED_MATVEC",
    "MATVEC",
    "MAX_MATRICES",
    "MAX_ROWS",
    "MIXTURE_MATVEC",
    "PRESETS",
    "QKV_APPEND_MATVEC",
    "QKV_MATVEC",
    "SHAPES",
    "MatvecConfig",
    "expert_matvec_rule",
    "float_matvec_rule",
    "fused_matvec_rule",
    "gated_matvec",
    "matvec",
    "matvec_rule",
    "mixture_matvec",
    "mixture_matvec_rule",
    "preset_cases",
    "qkv_append_matvec",
    "qkv_append_rule",
    "qkv_matvec",
    "takes_heads",
]
