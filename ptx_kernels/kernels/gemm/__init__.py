"""Packed weights times many rows of activations on tensor cores."""

from __future__ import annotations

from .config import F16_FORMATS, GemmConfig
from .family import GEMM
from .gemm import gemm, stackable, tile_count
from .rules import expert_gemm_rule, f16_gemm_rule, gemm_rule

__all__ = [
    "F16_FORMATS",
    "GEMM",
    "GemmConfig",
    "expert_gemm_rule",
    "gemm",
    "gemm_rule",
    "f16_gemm_rule",
    "stackable",
    "tile_count",
]
