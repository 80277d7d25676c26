"""Attention projections (q, k, v) as one tensor-core matmul launch of several matrices."""

from __future__ import annotations

from ...limits import MAX_MATRICES
from ...ptx import Builder, KernelError, kernel
from ..matvec.qkv import SUFFIXES
from ..matvec.rows import matrix
from .block import check_stack, input_activations, multiply
from .config import GemmConfig
from .epilogue import TileEpilogue, launch
from .spans import Span


@kernel
def qkv_gemm(
    k: Builder,
    *,
    formats: tuple[str, ...],
    rows: tuple[int, ...],
    columns: int,
    m: int,
    biases: bool = False,
    layers: int = 0,
    config: GemmConfig,
) -> None:
    """Kernel: y_i[j, r] = w_i[r] . x[j] + bias_i[r] for two to four packed matrices w_i.

    Matrix i is (rows[i], columns). Thread blocks along y are partitioned over the matrices, in
    order; formats may differ. Operands: the planes of each matrix, activations as in `gemm`, each
    bias. Results: each y.
    """
    if not (len(formats) == len(rows) and 2 <= len(rows) <= MAX_MATRICES):
        raise KernelError(f"formats={formats} and rows={rows} must be 2 to {MAX_MATRICES} matrices")
    for format, n in zip(formats, rows, strict=True):
        config.check(format, columns)
        check_stack(format, n, columns, layers)
    names = "_".join(dict.fromkeys(f.lower() for f in formats))
    products = "f16_" if config.products == "f16" else ""
    k.name = f"qkv_gemm_{names}_{products}m{config.m_tile}"
    parts = [
        matrix(k, f, n, columns, prefix=f"w{s[1:]}_", layers=layers)
        for f, n, s in zip(formats, rows, SUFFIXES, strict=False)
    ]
    activations = input_activations(k, config, m, columns)
    epilogues = [
        TileEpilogue(k, n, m, config, bias=biases, suffix=s)
        for n, s in zip(rows, SUFFIXES, strict=False)
    ]
    launch(k, config, m, *epilogues)
    block_m = Span(k, k.block_id("x"), m, config.m_tile)
    start = 0
    for weights, epilogue in zip(parts, epilogues, strict=True):
        block, count = k.block_id("y"), epilogue.blocks
        with k.when((block >= start) & (block < start + count)), k.free_shared():
            block_n = Span(k, block - start, weights.rows, config.rows)
            multiply(k, config, [weights], activations, epilogue, block_n, block_m)
        start += count
