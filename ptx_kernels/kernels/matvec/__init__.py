"""The mat-vec family: one design, whose strategies are values of MatvecConfig."""

from __future__ import annotations

from .config import MAX_ROWS, PRESETS, MatvecConfig
from .family import GATED_MATVEC, MATVEC, QKV_MATVEC, SHAPES, preset_cases
from .gated import gated_matvec
from .matvec import matvec
from .qkv import MAX_MATRICES, qkv_matvec
from .rules import float_matvec_rule, fused_matvec_rule, matvec_rule

__all__ = [
    "GATED_MATVEC",
    "MATVEC",
    "MAX_MATRICES",
    "MAX_ROWS",
    "PRESETS",
    "QKV_MATVEC",
    "SHAPES",
    "MatvecConfig",
    "float_matvec_rule",
    "fused_matvec_rule",
    "gated_matvec",
    "matvec",
    "matvec_rule",
    "preset_cases",
    "qkv_matvec",
]
