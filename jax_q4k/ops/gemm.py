"""Launches the tensor-core GEMM kernel, fused with norm, bias, residual and activation.

Replaces `gemv` if mat-vecs would take more instructions. The matmul is int8 with q8_1 activations,
or f16 where that is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax

from ptx_kernels.limits import MAX_MATRICES

from ..arrays.indexed import Packed, layers
from . import quantize_f16, quantize_q8_1, rms_norm
from .gemv import all_or_none
from .op import KernelCall

#: Rows of activations: floats (m, k); q8_1 with values s8 (m, k), and scale and sum f32 (m, k / 32,
#: 2); or the results of `quantize_f16`, values f16 (m, k), means f16 (m, k / 32, 2) and scale f32
#: (m, k / 256).
Rows = jax.Array | Sequence[jax.Array]

_PRODUCTS = {2: "int8", 3: "f16"}  # by the number of arrays in Rows


def takes(weights: Sequence[Packed], m: int, activations: str | None) -> bool:
    """Returns whether one tensor-core kernel multiplies m rows by all of these weights."""
    from ptx_kernels.kernels.gemm import stackable, tensor_cores_rule
    from ptx_kernels.tuning import decide

    if activations == "f32" or len(weights) > MAX_MATRICES:
        return False
    if any(layers(w) and not stackable(w.format, *w.shape) for w in weights):
        return False
    formats = tuple(w.format for w in weights)
    # `decide` keeps no record, because this question launches nothing.
    return bool(decide(tensor_cores_rule, formats, weights[0].shape[1], m).config)


def quantized_to(
    weights: Sequence[Packed], m: int, activations: str | None, *, launched: bool = False
) -> Literal["q8_1", "f16"]:
    """Returns the activation format, q8_1 or f16, that is fastest for a matmul of m rows.

    `launched`: the caller launches what the answer says, so it is recorded with the launch.
    """
    from ptx_kernels.kernels.gemm import f16_products_rule
    from ptx_kernels.tuning import choose, decide

    if activations is not None:
        return "q8_1"
    asked = f16_products_rule, tuple(w.format for w in weights), m
    return "f16" if (choose(*asked) if launched else decide(*asked).config) else "q8_1"


def takes_quantized(w: Packed, m: int, activations: str | None) -> bool:
    """Returns whether the kernel before a matmul by `w` should write its m rows quantized.

    It should for q8_1, and for f16 with few rows. Many f16 rows are faster to convert from floats.
    """
    from ptx_kernels.kernels.gemm import FEW_ROWS

    if not takes([w], m, activations):
        return False
    return m <= FEW_ROWS or quantized_to([w], m, activations) == "q8_1"


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
    output: Literal["f32", "q8_1", "f16"] = "f32",
    activations: str | None = "q8_1",
) -> list[jax.Array]:
    """[residual +] [rms_norm](x) @ dequantize(w).T [+ bias] for each w, in one launch.

    Unless x is quantized, a launch before it quantizes, or normalizes and quantizes: to q8_1, or
    with `activations` None to f16 if that is faster.

    With `activation`, the two weights are a gate and an up projection, and the result is
    activation(gate, up). With `output` q8_1 or f16, the result is quantized as by `quantize_q8_1`
    or `quantize_f16`.
    """
    from ptx_kernels.kernels import gemm as kernels
    from ptx_kernels.tuning import choose

    formats, rows = tuple(w.format for w in weights), tuple(w.shape[0] for w in weights)
    if isinstance(x, jax.Array):
        to = quantized_to(weights, x.shape[0], activations, launched=True)
        x = _quantized(launch, x, norm_weight, eps, to)
    m, columns = x[0].shape
    (stack,) = {layers(w) for w in weights}
    terms = [bias for bias in biases or () if bias is not None]
    plain = len(weights) == 1 and residual is None and not terms and output == "f32"
    products = _PRODUCTS[len(x)]
    if plain and products == "int8":
        config = choose(kernels.gemm_rule, formats[0], rows[0], columns, m)
    else:
        count = 1 if activation else len(weights)
        shape = formats, rows[:count], columns, m, output, products
        config = choose(kernels.fused_gemm_rule, *shape)
    common: dict[str, Any] = {"columns": columns, "m": m, "layers": stack, "config": config}
    if activation:
        kernel = kernels.gated_gemm(
            formats=formats, n=rows[0], activation=activation, output=output, **common
        )
    elif len(weights) == 1:
        kernel = kernels.gemm(
            format=formats[0],
            n=rows[0],
            bias=bool(terms),
            residual=residual is not None,
            output=output,
            **common,
        )
        terms += [] if residual is None else [residual]
    else:
        terms = all_or_none(weights, biases or [None] * len(weights))
        kernel = kernels.qkv_gemm(formats=formats, rows=rows, biases=bool(terms), **common)
    return launch(kernel, *jax.tree.leaves(list(weights)), *x, *terms)


def _quantized(
    launch: KernelCall,
    x: jax.Array,
    norm_weight: jax.Array | None,
    eps: float,
    to: Literal["q8_1", "f16"],
) -> Sequence[jax.Array]:
    """Quantizes [rms_norm](x) to q8_1 or f16."""
    if norm_weight is not None:
        return rms_norm.launches(launch, x, norm_weight, eps=eps, output=to)
    return (quantize_q8_1 if to == "q8_1" else quantize_f16).ptx(launch, x)
