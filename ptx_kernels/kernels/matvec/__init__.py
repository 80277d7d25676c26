"""The mat-vec family: one design, whose strategies are values of MatvecConfig."""

from __future__ import annotations

from .config import FORMATS, MAX_ROWS, PRESETS, MatvecConfig
from .matvec import matvec

__all__ = ["FORMATS", "MAX_ROWS", "PRESETS", "MatvecConfig", "matvec"]
