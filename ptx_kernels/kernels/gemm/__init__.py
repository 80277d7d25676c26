"""Packed weights times many rows of activations on tensor cores."""

from __future__ import annotations

from .gemm import F16_FORMATS, FORMATS, GemmConfig, gemm, takes

__all__ = ["F16_FORMATS", "FORMATS", "GemmConfig", "gemm", "takes"]
