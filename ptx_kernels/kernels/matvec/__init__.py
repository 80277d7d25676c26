"""The mat-vec family: one design, whose strategies are values of MatvecConfig."""

from __future__ import annotations

from .config import FORMATS, MAX_ROWS, PRESETS, MatvecConfig
from .gated import gated_matvec
from .matvec import matvec
from .qkv import MAX_MATRICES, qkv_matvec

__all__ = [
    "FORMATS",
    "MAX_MATRICES",
    "MAX_ROWS",
    "PRESETS",
    "MatvecConfig",
    "gated_matvec",
    "matvec",
    "qkv_matvec",
]
