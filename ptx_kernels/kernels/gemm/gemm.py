"""Tensor-core matmul kernel of packed weights with many activations: prompts, large batches."""

from __future__ import annotations

from typing import Literal

from ...ptx import Builder, KernelError, kernel
from ..matvec.rows import Matrix
from ..planes import input_planes
from .block import check_stack, input_activations, multiply
from .config import GemmConfig
from .epilogue import TileEpilogue, launch
from .spans import ExpertTile, Span, tile_count

_DEFAULT = GemmConfig()


@kernel
def gemm(
    k: Builder,
    *,
    format: str,
    n: int,
    columns: int,
    m: int,
    config: GemmConfig = _DEFAULT,
    layers: int = 0,
    experts: int = 0,
    bias: bool = False,
    residual: bool = False,
    output: Literal["f32", "q8_1", "f16"] = "f32",
) -> None:
    """Kernel: y[j, r] = dequantize(w[r]) . x[j] for weight rows r < n and activation rows j < m.

    Rows have `columns` values. A warp has tiles of 16 weight rows and all activations of its thread
    block (see `products`). Packed weights and activations are loaded by a pipeline with steps of
    256 columns each.

    Operands: the planes, or with `layers` the planes of a stack and an index (see `input_planes`);
    values s8 (m, columns) and scale_sum f32 (m, columns / 32, 2), or for f16 products values f16
    (m, columns), means f16 (m, columns / 32, 2) and scale f32 (m, columns / 256); bias f32 (n,) and
    residual f32 (m, n), which are added. Result: y f32 (m, n), or as q8_1 or f16 (see
    `TileEpilogue`).

    With `experts` the planes are a stack (experts, n, ...), and the rows of activations are sorted
    by expert. The first operand, `tiles`, s32 (`tile_count`, 3), has (expert, first row, end) of
    each tile along the grid's first axis, with at most m_tile rows. An expert id outside 0 to
    experts - 1 gives zeros. The tiles together cover all m rows.
    """
    config.check(format, columns)
    check_stack(format, n, columns, layers or experts)
    if experts and (bias or residual or output != "f32" or config.splits > 1):
        raise KernelError(f"experts={experts}: a stack's products have no epilogue, and no splits")
    products = "f16_" if config.products == "f16" else ""
    k.name = f"{'expert_' if experts else ''}gemm_{format.lower()}_{products}m{config.m_tile}"
    count = tile_count(m, experts, config.m_tile)
    number = k.block_id("x")
    tile = ExpertTile(k, number, count, m, config.m_tile) if experts else None
    planes = input_planes(
        k, format, n, columns, layers=layers, experts=experts, expert=tile.expert if tile else None
    )
    weights = [Matrix(format, n, columns, planes)]
    activations = input_activations(k, config, m, columns)
    epilogue = TileEpilogue(k, n, m, config, bias=bias, residual=residual, output=output)
    launch(k, config, m, epilogue, experts=experts)
    block_m = Span(k, number, m, config.m_tile) if tile is None else tile
    block_n = Span(k, k.block_id("y"), n, config.rows)
    if tile is None:
        multiply(k, config, weights, activations, epilogue, block_n, block_m)
        return
    with k.when(tile.expert < experts) as branch:
        multiply(k, config, weights, activations, epilogue, block_n, block_m)
    with branch.otherwise():
        epilogue.clear(block_n, tile)
