"""Two products of the same activations of which the first gates the second: SwiGLU, GEGLU.

They make the input of the feed-forward's down projection.
"""

from __future__ import annotations

from typing import Literal

from ...ptx import Builder, KernelError, kernel
from .config import MatvecConfig
from .epilogue import Epilogue
from .matvec import product
from .prologue import Prologue
from .rows import launch, matrix


@kernel
def gated_matvec(
    k: Builder,
    *,
    formats: tuple[str, str],
    n: int,
    columns: int,
    m: int,
    layers: int = 0,
    activation: Literal["silu", "gelu", "swiglu_oai"] = "silu",
    norm: bool = False,
    eps: float = 0.0,
    dtype: str = "f32",
    output: Literal["f32", "q8_1"] = "f32",
    config: MatvecConfig,
) -> None:
    """y[j, r] = gate of gate[r] . x[j] and up[r] . x[j] for two packed matrices (n, columns).

    `activation` names the gate (`activation.GATES`): silu and gelu are multiplied by the second.

    A team computes the same rows of both. Formats may differ; operands are as those of `matvec`,
    with the planes of `gate` and then of `up` first.
    """
    if len(formats) != 2:
        raise KernelError(f"formats={formats} must be those of gate and up")
    for format in formats:
        config.check(format, n, columns, m)
    k.name = f"gated_matvec_{'_'.join(dict.fromkeys(f.lower() for f in formats))}_m{m}"
    pair = [
        matrix(k, f, n, columns, prefix=p, layers=layers)
        for f, p in zip(formats, ("gate_", "up_"), strict=True)
    ]
    prologue = Prologue(k, m=m, columns=columns, norm=norm, eps=eps, dtype=dtype, config=config)
    epilogue = Epilogue(k, n, m, config, activation=activation, output=output)
    (blocks,) = launch(k, config, n)
    prologue.stage()
    product(k, pair, prologue, epilogue, blocks)
