"""Gated mat-vec kernel (gate and up projections): two mat-vecs of one input, as in SwiGLU, GEGLU.

Its result is the input of the down projection.
"""

from __future__ import annotations

from typing import Literal

from ...ptx import Builder, KernelError, kernel
from ..route import Routing
from .config import MatvecConfig
from .epilogue import Epilogue
from .experts import Experts, check_shared, chosen
from .matvec import whole_product
from .prologue import InputRows, Prologue
from .rows import matrix


@kernel
def gated_matvec(
    k: Builder,
    *,
    formats: tuple[str, str],
    n: int,
    x: InputRows,
    layers: int = 0,
    activation: Literal["silu", "gelu", "swiglu_oai"] = "silu",
    biases: bool = False,
    moe: Experts,
    routing: Routing | None = None,
    shared_gate: bool = False,
    output: Literal["f32", "q8_1"] = "f32",
    config: MatvecConfig,
) -> None:
    """Kernel: y[j, r] = activation(gate[r] . x[j], up[r] . x[j]) for two packed matrices.

    Both matrices are (n, columns); their formats may differ. `activation` names the gate
    (`activation.GATES`): silu and gelu of the first product are multiplied by the second.

    A team computes the same rows of both. Operands are those of `matvec`, with the planes of `gate`
    and then of `up` first, and with `biases` one for each, f32 (n,), added before the gate;
    `experts` and `top` as there. With a `routing` the router logits replace the ids. The ids are
    then a result, with their weights, before y (`route.Router`).

    With a `shared` expert, row t * (top + 1) + top of y is the product of x[t] and this expert's
    matrices (n, columns), whose planes follow those of each stack. `shared_gate`: whether its
    weight is the sigmoid of shared_logits, f32 (m, 1), which follow the selection bias.
    """
    if len(formats) != 2:
        raise KernelError(f"formats={formats} must be those of gate and up")
    m, columns = x.m, x.columns
    choice = chosen(k, m, moe, routing, gated=shared_gate)
    if moe.shared:
        check_shared(biases)
    for format in formats:
        config.check(format, n, columns, 1 if choice else m)
    names = "_".join(dict.fromkeys(f.lower() for f in formats))
    kind = "routed_" if routing else "expert_" if choice else ""
    kind += "shared_" if moe.shared else ""
    k.name = f"{kind}gated_matvec_{names}_m{m}"
    pair = [
        matrix(
            k, f, n, columns, prefix=p, layers=layers, block_row=choice, streamed=config.streamed
        )
        for f, p in zip(formats, ("gate_", "up_"), strict=True)
    ]
    prologue = Prologue(k, x, config, choice)
    results = choice.count if choice else m
    epilogue = Epilogue(
        k, n, results, config, bias=biases, activation=activation, output=output, block_row=choice
    )
    whole_product(k, pair, prologue, epilogue, choice)
