"""Gated matmul kernel (gate and up projections): two tensor-core matmuls of one input."""

from __future__ import annotations

from typing import Literal

from ...ptx import Builder, KernelError, kernel
from ..matvec.rows import matrix
from .block import check_stack, input_activations, multiply
from .config import GemmConfig
from .epilogue import TileEpilogue, launch
from .spans import Span


@kernel
def gated_gemm(
    k: Builder,
    *,
    formats: tuple[str, str],
    m: int,
    n: int,
    columns: int,
    layers: int = 0,
    activation: Literal["silu", "gelu", "swiglu_oai"] = "silu",
    output: Literal["f32", "q8_1", "f16"] = "f32",
    config: GemmConfig,
) -> None:
    """Kernel: y[j, r] = activation(gate[r] . x[j], up[r] . x[j]) for two packed matrices.

    Both matrices are (n, columns); their formats may differ. `activation` names the gate
    (`activation.GATES`). A warp has the same tiles of both matrices. Operands are those of `gemm`,
    with the planes of `gate` and then of `up` first.
    """
    if len(formats) != 2:
        raise KernelError(f"formats={formats} must be those of gate and up")
    for format in formats:
        config.check(format, columns)
        check_stack(format, n, columns, layers)
    names = "_".join(dict.fromkeys(f.lower() for f in formats))
    products = "f16_" if config.products == "f16" else ""
    k.name = f"gated_gemm_{names}_{products}m{config.m_tile}"
    pair = [
        matrix(k, f, n, columns, prefix=p, layers=layers)
        for f, p in zip(formats, ("gate_", "up_"), strict=True)
    ]
    activations = input_activations(k, config, m, columns)
    epilogue = TileEpilogue(k, n, m, config, activation=activation, output=output)
    launch(k, config, m, epilogue)
    block_m = Span(k, k.block_id("x"), m, config.m_tile)
    block_n = Span(k, k.block_id("y"), n, config.rows)
    multiply(k, config, pair, activations, epilogue, block_n, block_m)
