"""Matmul of many rows: kernels decode weights and activations to float16, XLA multiplies them.

Replaces `gemm` for many rows of activations if XLA's matmul (cuBLAS) beats kernels that unpack
weights inside the matmul by more than the decoding takes.

Nothing overflows: each row of weights and of activations is divided by a power of two, and results
are multiplied by both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ..arrays.indexed import Packed
from ..custom_call import ptx_name
from . import dequantize, rms_norm
from .gates import ACTIVATION_FUNCTIONS
from .op import KernelCall

#: Bounds of the scaled values, by result type. float16 values that are accumulated in float32 can
#: use float16's full range. For float16 results, values are below 1, so that sums of up to 32768
#: columns do not overflow.
_BELOW = {jnp.float32: 1 << 15, jnp.float16: 1}


class Rows(NamedTuple):
    """Activations as float16 values (m, k) and one float32 scale per row (m,)."""

    values: jax.Array
    scale: jax.Array


def takes(
    weights: Sequence[Packed],
    m: int,
    activations: str | None,
    *,
    gated: bool = False,
    launched: bool = False,
) -> bool:
    """Returns whether XLA should decode these weights and multiply m rows of activations by them.

    `gated`: the two weights are a gate and an up projection. `launched`: the caller launches what
    the answer says, so the decision is recorded with the launches.
    """
    from ptx_kernels.kernels.gemm import FEW_ROWS, decodable, decoded_products_rule
    from ptx_kernels.tuning import choose, current_device, decide

    if activations is not None or m <= FEW_ROWS:
        return False
    rows, columns = tuple(w.shape[0] for w in weights[: 1 if gated else None]), weights[0].shape[1]
    if (switch := current_device().decoded_products) is not None:
        return switch and decodable(rows, columns, len(weights))
    asked = decoded_products_rule, tuple(w.format for w in weights), rows, columns, m
    return (choose(*asked) if launched else decide(*asked).config).decoded


def products(
    launch: KernelCall,
    x: jax.Array | Rows,
    weights: Sequence[Packed],
    *,
    norm_weight: jax.Array | None = None,
    eps: float = 0.0,
    biases: Sequence[jax.Array | None] | None = None,
    residual: jax.Array | None = None,
    activation: str | None = None,
    output: Literal["f32", "rows"] = "f32",
) -> list[Any]:
    """[residual +] [rms_norm](x) @ dequantize(w).T [+ bias] for each w, float32.

    With `activation`, the two weights are a gate and an up projection, and the only result is
    activation(gate, up); with `output` rows it is Rows.
    """
    # A gate's products are float16: half the memory, and as precise as the Rows made from them.
    dtype = jnp.float16 if activation else jnp.float32
    if not isinstance(x, Rows):
        x = _rows(launch, x, norm_weight, eps, _BELOW[dtype])
    factors = []
    for w in weights:
        # Without the barrier XLA joins products of the same activations, and copies their weights.
        values, w = jax.lax.optimization_barrier((x.values, w))
        decoded, scale = dequantize.scaled(launch, w, _BELOW[dtype])
        factors.append((_dot(values, decoded, dtype), scale))
    if activation and output == "rows":
        return [_gated_rows(launch, x.scale, factors, activation)]
    row = x.scale[:, None]
    ys = [y.astype(jnp.float32) * row * scale.astype(jnp.float32) for y, scale in factors]
    if activation:
        return [ACTIVATION_FUNCTIONS[activation](*ys)]
    terms = biases or [None] * len(weights)
    ys = [y if bias is None else y + bias for y, bias in zip(ys, terms, strict=True)]
    return ys if residual is None else [residual + ys[0]]


def _dot(x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    """Multiplies float16 x (m, k) by w (n, k) transposed; returns `dtype`."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _rows(
    launch: KernelCall, x: jax.Array, norm_weight: jax.Array | None, eps: float, below: int
) -> Rows:
    """Returns [rms_norm](x) as Rows; a row's scale is a power of two.

    The scale brings the row's largest magnitude below `below`.
    """
    from ptx_kernels.kernels.f16_rows import MAX_NORMALIZED, f16_rows, f16_rows_rule
    from ptx_kernels.tuning import choose

    rows, columns = x.shape
    if norm_weight is not None and columns > MAX_NORMALIZED:
        x, norm_weight = rms_norm.ptx(launch, x, norm_weight, eps=eps), None
    sizes: dict[str, Any] = {"rows": rows, "columns": columns, "below": below}
    config = choose(f16_rows_rule, columns)
    if norm_weight is not None:
        kernel = f16_rows(**sizes, eps=eps, config=config)
        return Rows(*launch(kernel, x.astype(jnp.float32), norm_weight))
    return Rows(*launch(f16_rows(**sizes, dtype=ptx_name(x.dtype), config=config), x))


def _gated_rows(
    launch: KernelCall,
    row_scale: jax.Array,
    factors: Sequence[tuple[jax.Array, jax.Array]],
    activation: str,
) -> Rows:
    """Applies the activation to a gate and an up projection (m, n); returns Rows.

    row_scale: (m,), the scales of the activations that were projected.
    factors: of gate and up, the float16 projection (m, n) and its weights' row scales (n,).
    """
    from ptx_kernels.kernels.f16_rows import f16_rows, f16_rows_rule
    from ptx_kernels.tuning import choose

    (gate, gate_scale), (up, up_scale) = factors
    rows, columns = gate.shape
    config = choose(f16_rows_rule, columns)
    kernel = f16_rows(rows=rows, columns=columns, activation=activation, config=config)
    return Rows(*launch(kernel, gate, up, row_scale, gate_scale, up_scale))
