"""Tensor-core matmuls of packed (quantized) weights with many rows of activations."""

from __future__ import annotations

from .block import stackable
from .config import F16_FORMATS, GemmConfig
from .decoded import decodable, decoded_products_rule, dot_seconds
from .family import GATED_GEMM, GEMM, QKV_GEMM
from .gated import gated_gemm
from .gemm import gemm
from .qkv import qkv_gemm
from .rules import (
    FEW_ROWS,
    expert_gemm_rule,
    f16_products_rule,
    fused_gemm_rule,
    gemm_rule,
    tensor_cores_rule,
)
from .spans import tile_count

__all__ = [
    "F16_FORMATS",
    "FEW_ROWS",
    "GATED_GEMM",
    "GEMM",
    "QKV_GEMM",
    "GemmConfig",
    "decodable",
    "decoded_products_rule",
    "dot_seconds",
    "expert_gemm_rule",
    "f16_products_rule",
    "fused_gemm_rule",
    "gated_gemm",
    "gemm",
    "gemm_rule",
    "qkv_gemm",
    "stackable",
    "tensor_cores_rule",
    "tile_count",
]
