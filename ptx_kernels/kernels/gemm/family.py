"""Kernel families of tensor-core matmuls: one matrix, a gated pair, joined matrices, experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...ptx import Buffer, Kernel, u8
from ..family import Arguments, Case, PackedWeights, joined, matmul_family, one_layer, pair
from .config import GemmConfig
from .decoded import decoded_products_rule
from .gated import gated_gemm
from .gemm import gemm
from .qkv import qkv_gemm
from .rules import expert_gemm_rule, f16_products_rule, fused_gemm_rule, gemm_rule
from .spans import tile_count


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
    label = f"{format}-{n}x{columns}-m{m}{'' if products == 'int8' else '-' + products}"
    return Case.of(gemm, label, format=format, n=n, columns=columns, m=m, config=config)


def _of_experts(
    format: str, m: int, n: int, columns: int, experts: int, config: GemmConfig
) -> Case:
    sizes: dict[str, Any] = dict(format=format, n=n, columns=columns, m=m, experts=experts)
    return Case.of(gemm, f"experts-{format}-{n}x{columns}-m{m}", **sizes, config=config)


_PLAIN = (
    _case("Q4_K", 8, 14336, 4096, 4, 1, 1, 8, 4),
    _case("Q6_K", 4, 4096, 14336, 1, 4, 1, 8, 8),
    _case("Q4_K", 16, 4096, 4096, 1, 4, 1, 16, 4),
    _case("Q4_K", 64, 4096, 4096, 2, 2, 1, 64, 2),
    _case("Q4_K", 512, 14336, 4096, 4, 1, 2, 64, 2),
    _case("Q5_K", 128, 14336, 4096, 4, 1, 2, 64, 2),
    _case("Q6_K", 16, 4096, 14336, 1, 4, 1, 16, 4),
    _case("Q6_K", 128, 4096, 14336, 4, 1, 1, 64, 2),
    _case("Q6_K", 37, 5, 3 * 256, 2, 2, 1, 48, 2),  # truncated rows, an odd total number of f16
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
    _of_experts("Q4_K", 4096, 768, 2048, 128, GemmConfig(4, 1, 2, 32, 2)),
    _of_experts("Q6_K", 4096, 2048, 768, 128, GemmConfig(4, 1, 1, 32, 3)),
    _of_experts("MXFP4", 256, 2880, 2880, 32, GemmConfig(4, 1, 2, 16, 2)),
)


_PAIR: dict[str, Any] = dict(formats=("Q4_K", "Q4_K"), n=14336, columns=4096)
_QKV: dict[str, Any] = dict(formats=("Q4_K", "Q4_K", "Q6_K"), rows=(4096, 1024, 1024), columns=4096)
_ADDED: dict[str, Any] = dict(format="Q6_K", n=4096, columns=14336, bias=True, residual=True)


def _fused(
    build: Callable[..., Kernel], label: str, m: int, config: GemmConfig, **arguments: Any
) -> Case:
    return Case.of(build, f"{label}-m{m}", **arguments, m=m, config=config)


_CASES = (
    *_PLAIN,
    _fused(gemm, "residual", 8, GemmConfig(2, 2, 1, 8, 4), **_ADDED),
    _fused(gemm, "split", 32, GemmConfig(8, 1, 2, 32, 2, "f16", 8), **_ADDED),
    _fused(gated_gemm, "q8_1-output", 8, GemmConfig(4, 1, 1, 8, 4), output="q8_1", **_PAIR),
    _fused(gated_gemm, "q8_1-output", 32, GemmConfig(4, 1, 1, 32, 3), output="q8_1", **_PAIR),
    _fused(gated_gemm, "f16-output", 32, GemmConfig(8, 1, 1, 32, 2, "f16"), output="f16", **_PAIR),
    _fused(qkv_gemm, "Q4_K-Q6_K", 8, GemmConfig(2, 2, 1, 8, 4), **_QKV),
    _fused(qkv_gemm, "biases", 32, GemmConfig(2, 2, 1, 32, 4), biases=True, **_QKV),
)


def _passes(arguments: Arguments) -> int:
    """Returns how often all weights are read: once per tile of `m_tile` rows of activations.

    For experts, whose tiles read one matrix each, it is the average over all matrices.
    """
    m, m_tile = arguments["m"], arguments["config"].m_tile
    experts = arguments.get("experts", 0)
    return max(1, tile_count(m, experts, m_tile) // experts) if experts else math.ceil(m / m_tile)


def _weights(arguments: Arguments) -> PackedWeights:
    """Returns the weights of the matrix, or of all matrices of a stack of experts."""
    one = arguments["n"] * arguments["columns"]
    return PackedWeights((arguments["format"],), one * max(1, arguments["experts"]))


def _touched(buffer: Buffer, arguments: Arguments) -> float:
    """Returns the fraction of a buffer that is read: 1 with experts, else as in `one_layer`.

    A prompt's rows use all experts.
    """
    return 1 if arguments["experts"] else one_layer(buffer, arguments)


def _tiles(buffer: Buffer, buffers: Mapping[str, Buffer], rng: np.random.Generator) -> np.ndarray:
    """Returns random `tiles`: tiles of rows assigned to experts, a last group assigned to none."""
    experts = next(b.shape[0] for b in buffers.values() if b.type is u8)
    rows = buffers["values"].shape[0]
    m_tile = -(-rows // (buffer.shape[0] - experts))
    ends = np.sort(rng.integers(0, rows + 1, experts)).tolist() + [rows]
    tiles, first = [], 0
    for expert, end in enumerate(ends):
        tiles += [(expert, at, min(at + m_tile, end)) for at in range(first, end, m_tile)]
        first = end
    return np.array(tiles + [(experts, 0, 0)] * (buffer.shape[0] - len(tiles)))


def _shorter(arguments: Arguments) -> tuple[str, int]:
    """Returns ("columns", size): one step of the pipeline, at least 1024 columns.

    There is work for all column warps and splits.
    """
    config = arguments["config"]
    return "columns", max(1024, config.columns * config.splits)


GEMM = matmul_family(
    gemm,
    _CASES,
    *(gemm_rule, f16_products_rule, fused_gemm_rule, expert_gemm_rule, decoded_products_rule),
    weights=_weights,
    touched=_touched,
    passes=_passes,
    shorter=_shorter,
    operands={"tiles": _tiles},
)
GATED_GEMM = matmul_family(gated_gemm, _CASES, fused_gemm_rule, weights=pair, passes=_passes)
QKV_GEMM = matmul_family(qkv_gemm, _CASES, fused_gemm_rule, weights=joined, passes=_passes)
