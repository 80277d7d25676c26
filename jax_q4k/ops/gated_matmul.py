"""The gated feed-forward network of a decoder: gate and up projections, their product, and the way
down.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ptx_kernels import tuning
from ptx_kernels.kernels.matvec import gated_matvec
from ptx_kernels.kernels.quantize_q8_1 import GROUP

from ..arrays import QuantizedArray
from ..implementation import check_selection, current_selection
from ..native import calls
from . import checks, fused_matmul, matmul
from .fused_matmul import (
    Norm,
    Product,
    activation_operands,
    by_kernels,
    joinable,
    kernel_steps,
    one_matvec,
    public_steps,
    reference_steps,
    row_operands,
)
from .op import KernelCall, Op

#: How the gate is applied; `gelu` is the approximation by tanh (https://arxiv.org/abs/1606.08415).
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
}


def gated_matmul(
    x: Any,
    gate: Any,
    up: Any,
    *,
    activation: str = "silu",
    norm_weight: Any = None,
    eps: float | None = None,
    activations: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """activation(x @ dequantize(gate).T) * (x @ dequantize(up).T), accumulated in float32.

    Args:
      x: (..., k) float32, bfloat16 or float16.
      gate, up: QuantizedArrays (n, k), whose formats may differ, or float arrays.
      activation: `silu`, or `gelu` (the approximation by tanh).
      norm_weight: (k,): x is normalized first, with `eps`, as `rms_norm` does it; None: as it is.
      activations, implementation: as `matmul` takes them.

    Returns:
      (..., n) of x's dtype. Differentiable as the chain of `rms_norm` and `matmul` is.

    Raises:
      TypeError: a dtype that is not listed. ValueError: shapes that don't fit, an unknown name,
        norm_weight without eps.
    """
    return _gated(
        "gated_matmul",
        x,
        gate,
        up,
        None,
        activation,
        norm_weight,
        eps,
        None,
        activations,
        implementation,
    )


def mlp(
    x: Any,
    gate: Any,
    up: Any,
    down: Any,
    *,
    activation: str = "silu",
    norm_weight: Any = None,
    eps: float | None = None,
    residual: Any = None,
    activations: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """residual + gated_matmul(x, gate, up) @ dequantize(down).T.

    Args:
      x, gate, up, activation, norm_weight, eps, activations, implementation: as `gated_matmul`
      takes them.
      down: QuantizedArray (n, inner) where gate and up are (inner, k), or a float array.
      residual: (..., n) or None.

    Returns:
      (..., n) of x's dtype. Differentiable as the chain of `rms_norm` and `matmul` is.

    Raises:
      TypeError, ValueError: as `gated_matmul`.
    """
    down = checks.weight("down", down)
    return _gated(
        "mlp",
        x,
        gate,
        up,
        down,
        activation,
        norm_weight,
        eps,
        residual,
        activations,
        implementation,
    )


class Operands(NamedTuple):
    """What the primitive takes, as a pytree; all but the weights float32."""

    x: jax.Array  # (m, k)
    residual: jax.Array | None  # (m, n)
    norm_weight: jax.Array | None  # (k,)
    gate: Any  # packed (inner, k), as `up`
    up: Any
    down: Any  # packed (n, inner); None: the result is what it would be given


def _gated(
    name: str,
    x: Any,
    gate: Any,
    up: Any,
    down: Any,
    activation: str,
    norm_weight: Any,
    eps: float | None,
    residual: Any,
    activations: str | None,
    implementation: str | None,
) -> jax.Array:
    x = checks.float_array("x", x)
    gate, up = checks.weight("gate", gate), checks.weight("up", up)
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} must be one of {', '.join(ACTIVATIONS)}")
    chosen = (
        check_selection(implementation, activations).activations or current_selection().activations
    )
    checks.same_shape("up", up, gate.shape, "gate's shape")
    inner, k = gate.shape
    if x.ndim < 1 or x.shape[-1] != k:
        raise ValueError(
            f"x has shape {x.shape}; its last axis must be k={k}, as in gate {gate.shape}"
        )
    if down is not None and down.shape[1] != inner:
        raise ValueError(
            f"down has shape {down.shape}; it must be (n, {inner}), as gate is {gate.shape}"
        )
    *leading, _ = x.shape
    m, n = math.prod(leading), inner if down is None else down.shape[0]
    operands = Operands(
        x.reshape(m, k).astype(jnp.float32),
        None
        if residual is None
        else checks.float32("residual", residual, (*leading, n), "(..., n)").reshape(m, n),
        None if norm_weight is None else checks.float32("norm_weight", norm_weight, (k,), "(k,)"),
        gate,
        up,
        down,
    )
    eps = 0.0 if norm_weight is None else checks.epsilon("eps", eps)
    params = {"eps": eps, "activation": activation, "activations": chosen}
    packed = all(
        isinstance(w, QuantizedArray) and w.shape[0] for w in (gate, up, down) if w is not None
    )
    if m and packed and current_selection().fuses(name):
        leaves, tree = jax.tree.flatten(operands)
        (y,) = _op.bind(*leaves, tree=tree, **params, implementation=implementation)
    elif down is None:
        (y,) = chain(operands, eps, activation, *public_steps(chosen, implementation))
    else:
        options: dict[str, Any] = {"activations": chosen, "implementation": implementation}
        h = gated_matmul(
            operands.x, gate, up, activation=activation, norm_weight=norm_weight, eps=eps, **options
        )
        y = matmul.matmul(h, down, residual=operands.residual, **options)
    return y.reshape(*leading, n).astype(x.dtype)


def chain(
    operands: Operands, eps: float, activation: str, norm: Norm, product: Product
) -> list[jax.Array]:
    """The operation step by step."""
    x, residual, norm_weight, gate, up, down = operands
    h = x if norm_weight is None else norm(x, norm_weight, eps)
    y = ACTIVATIONS[activation](product(h, gate)) * product(h, up)
    y = y if down is None else product(y, down)
    return [y if residual is None else residual + y]


def reference(
    *leaves: jax.Array, tree: Any, eps: float, activation: str, activations: str | None
) -> list[jax.Array]:
    """The operation in plain JAX."""
    return chain(jax.tree.unflatten(tree, leaves), eps, activation, *reference_steps(activations))


def kernels(
    launch: KernelCall,
    *leaves: jax.Array,
    tree: Any,
    eps: float,
    activation: str,
    activations: str | None,
) -> list[jax.Array]:
    """The operation by PTX kernels; `activations` None: whichever is fastest."""
    operands: Operands = jax.tree.unflatten(tree, leaves)
    x, residual, norm_weight, gate, up, down = operands
    (m, columns), inner = x.shape, gate.shape[0]
    if activations == "f32" or not joinable((gate, up), m):
        return chain(operands, eps, activation, *kernel_steps(launch, activations))
    hands_on = down is not None and inner % GROUP == 0 and joinable((down,), m)
    output: Literal["f32", "q8_1"] = "q8_1" if hands_on else "f32"
    formats = gate.format, up.format
    config = tuning.fused_matvec(formats, (inner,), columns, m, floats=True, output=output)
    given, norm = activation_operands(launch, config, x, norm_weight, eps)
    kernel = gated_matvec(
        formats=formats,
        n=inner,
        columns=columns,
        m=m,
        activation=activation,
        output=output,
        config=config,
        **norm,
    )
    h = launch(kernel, *gate.planes, *up.planes, *given)
    if down is None:
        return h
    if not hands_on:
        return by_kernels(
            launch, fused_matmul.Operands(h[0], residual, None, (down,), (None,)), 0.0, activations
        )
    return one_matvec(
        launch,
        down,
        h,
        None,
        residual,
        tuning.fused_matvec((down.format,), down.shape[:1], inner, m),
    )


def native(
    *leaves: jax.Array, tree: Any, eps: float, activation: str, activations: str | None
) -> list[jax.Array]:
    """The operation by a call of the CPU's kernels; `activations` None means q8_1."""
    x, residual, norm_weight, gate, up, down = jax.tree.unflatten(tree, leaves)
    (m, k), inner = x.shape, gate.shape[0]

    def quantized(columns: int, *weights: QuantizedArray) -> bool:
        return activations != "f32" and all(
            matmul.takes_q8_1(w.format, m, columns) for w in weights
        )

    options: dict[str, Any] = {"norm_weight": norm_weight, "eps": eps, "activation": activation}
    first = quantized(k, gate, up)
    if down is None:
        return calls.products(x, [gate, up], quantized=first, **options)
    return [
        calls.mlp(
            x,
            gate,
            up,
            down,
            quantized=(first, quantized(inner, down)),
            residual=residual,
            **options,
        )
    ]


def _abstract_eval(*leaves: Any, tree: Any, **_: Any) -> list[jax.core.ShapedArray]:
    operands: Operands = jax.tree.unflatten(tree, leaves)
    last = operands.gate if operands.down is None else operands.down
    return [jax.core.ShapedArray((operands.x.shape[0], last.shape[0]), jnp.float32)]


_op = Op(
    "q4k_gated_matmul",
    abstract_eval=_abstract_eval,
    reference=reference,
    kernels=kernels,
    native=native,
)
_op.define_derivative_of(
    lambda *leaves, tree, eps, activation, activations, implementation: chain(
        jax.tree.unflatten(tree, leaves),
        eps,
        activation,
        *public_steps(activations, implementation),
    )
)
_op.define_vmap_of_rows(row_operands)
