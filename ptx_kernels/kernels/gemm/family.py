"""The tensor-core products as a kernel family."""

from __future__ import annotations

import math

from ..family import Arguments, Case, Family, one_layer, one_matrix
from .config import GemmConfig
from .gemm import gemm
from .rules import f16_gemm_rule, gemm_rule


def _case(
    format: str,
    m: int,
    n: int,
    columns: int,
    row_warps: int,
    column_warps: int,
    tiles: int,
    m_tile: int,
    stages: int,
    products: str = "int8",
) -> Case:
    config = GemmConfig(row_warps, column_warps, tiles, m_tile, stages, products)
    label = f"gemm-{format}-{n}x{columns}-m{m}{'' if products == 'int8' else '-' + products}"
    return Case(label, "gemm", dict(format=format, n=n, columns=columns, m=m, config=config))


EXAMPLES = (
    _case("Q4_K", 16, 4096, 4096, 1, 4, 1, 16, 4),
    _case("Q4_K", 64, 4096, 4096, 2, 2, 1, 64, 2),
    _case("Q4_K", 512, 14336, 4096, 4, 1, 2, 64, 2),
    _case("Q5_K", 128, 14336, 4096, 4, 1, 2, 64, 2),
    _case("Q6_K", 16, 4096, 14336, 1, 4, 1, 16, 4),
    _case("Q6_K", 128, 4096, 14336, 4, 1, 1, 64, 2),
    _case("Q6_K", 37, 5, 3 * 256, 2, 2, 1, 48, 2),  # rows cut short, an odd number of f16 in all
    _case("Q8_0", 64, 4864, 896, 4, 1, 1, 64, 2),
    _case("Q5_0", 64, 4864, 896, 4, 1, 2, 64, 2),
    _case("Q5_1", 16, 896, 4864, 1, 4, 1, 16, 4),
    _case("Q4_0", 64, 4864, 896, 4, 1, 2, 64, 2),
    _case("Q4_1", 64, 4864, 896, 4, 1, 2, 64, 2),
    _case("IQ4_XS", 64, 4096, 4096, 2, 2, 2, 64, 2),
    _case("Q3_K", 64, 4096, 4096, 2, 2, 1, 64, 2),
    _case("IQ4_NL", 64, 4864, 896, 4, 1, 2, 64, 2),
    _case("MXFP4", 64, 2880, 2880, 4, 1, 2, 64, 2),
    _case("Q4_K", 512, 14336, 4096, 8, 1, 2, 64, 2, "f16"),
    _case("Q5_K", 512, 14336, 4096, 8, 1, 2, 48, 2, "f16"),
    _case("Q6_K", 512, 4096, 14336, 8, 1, 2, 64, 2, "f16"),
)


def _passes(arguments: Arguments) -> int:
    """A block multiplies `m_tile` rows of activations: each such tile reads all weights."""
    return math.ceil(arguments["m"] / arguments["config"].m_tile)


GEMM = Family(
    "gemm",
    gemm,
    EXAMPLES,
    rules=(gemm_rule, f16_gemm_rule),
    weights=one_matrix,
    touched=one_layer,
    passes=_passes,
)
