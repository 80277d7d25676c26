"""Packed weights times many rows of activations on tensor cores."""

from __future__ import annotations

from .family import GEMM
from .gemm import F16_FORMATS, FORMATS, GemmConfig, gemm, takes
from .rules import gemm_rule, half_gemm_rule

__all__ = [
    "F16_FORMATS",
    "FORMATS",
    "GEMM",
    "GemmConfig",
    "gemm",
    "gemm_rule",
    "half_gemm_rule",
    "takes",
]
