"""Tensor-core products of a few rows, with the operations around them, as launches.

What `gemv` is where mat-vecs would take more instructions: q8_1 activations, up to 64 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax

from ptx_kernels.limits import MAX_MATRICES

from ..indexed import Packed, layers
from . import quantize_q8_1, rms_norm
from .gemv import all_or_none
from .op import KernelCall

#: Rows as floats (m, k), or as q8_1: values s8 (m, k), and scale and sum f32 (m, k / 32, 2).
Rows = jax.Array | Sequence[jax.Array]


def takes(weights: Sequence[Packed], m: int, activations: str | None) -> bool:
    """True if tensor cores multiply m rows of activations by these, with what stands around."""
    from ptx_kernels.kernels.gemm import FEW_ROWS, stackable, tensor_cores_rule
    from ptx_kernels.tuning import decide

    if activations == "f32" or m > FEW_ROWS or len(weights) > MAX_MATRICES:
        return False
    if any(layers(w) and not stackable(w.format, *w.shape) for w in weights):
        return False
    formats = tuple(w.format for w in weights)
    # `decide` keeps no record: what is asked here is not what is launched.
    return bool(decide(tensor_cores_rule, formats, weights[0].shape[1], m).config)


def gemm(
    launch: KernelCall,
    x: Rows,
    weights: Sequence[Packed],
    *,
    norm_weight: jax.Array | None = None,
    eps: float = 0.0,
    biases: Sequence[jax.Array | None] | None = None,
    residual: jax.Array | None = None,
    activation: str | None = None,
    output: Literal["f32", "q8_1"] = "f32",
) -> list[jax.Array]:
    """[residual +] [rms_norm](x) @ dequantize(w).T [+ bias] for each w by one launch.

    A launch that quantizes, or normalizes and quantizes, goes before it unless x is q8_1.

    With `activation`: that of the first product, times the second. `output` q8_1: what
    `quantize_q8_1` makes of the result.
    """
    from ptx_kernels.kernels import gemm as kernels
    from ptx_kernels.tuning import choose

    if isinstance(x, jax.Array):
        x = _quantized(launch, x, norm_weight, eps)
    m, columns = x[0].shape
    formats, rows = tuple(w.format for w in weights), tuple(w.shape[0] for w in weights)
    (stack,) = {layers(w) for w in weights}
    given = [bias for bias in biases or () if bias is not None]
    plain = len(weights) == 1 and residual is None and not given
    if plain:
        config = choose(kernels.gemm_rule, formats[0], rows[0], columns, m)
    else:
        count = 1 if activation else len(weights)
        config = choose(kernels.fused_gemm_rule, formats, rows[:count], columns, m, output)
    common: dict[str, Any] = {"columns": columns, "m": m, "layers": stack, "config": config}
    if activation:
        kernel = kernels.gated_gemm(
            formats=formats, n=rows[0], activation=activation, output=output, **common
        )
    elif len(weights) == 1:
        kernel = kernels.gemm(
            format=formats[0],
            n=rows[0],
            bias=bool(given),
            residual=residual is not None,
            output=output,
            **common,
        )
        given += [] if residual is None else [residual]
    else:
        given = all_or_none(weights, biases or [None] * len(weights))
        kernel = kernels.qkv_gemm(formats=formats, rows=rows, biases=bool(given), **common)
    return launch(kernel, *jax.tree.leaves(list(weights)), *x, *given)


def _quantized(
    launch: KernelCall, x: jax.Array, norm_weight: jax.Array | None, eps: float
) -> Sequence[jax.Array]:
    """[rms_norm](x) as q8_1."""
    if norm_weight is None:
        return quantize_q8_1.ptx(launch, x)
    return rms_norm.launches(launch, x, norm_weight, eps=eps, output="q8_1")
