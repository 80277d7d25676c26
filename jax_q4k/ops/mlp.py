"""Gated feed-forward network (MLP) with its gate, up and down projections, as one operation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ptx_kernels.limits import GROUP, SUPER_BLOCK

from ..arrays.indexed import Packed, axes
from ..native import calls
from ..selection import activations_of, current_selection
from ..sharding.layout import Layout, Parts, Rows
from . import checks, decoded, gemm, linear, linear_op, packed_matmul
from .op import KernelCall, Op
from .prefetch import asking, prefetched
from .select_kernel import select_matmul_kernel
from .vmaps import by_rows


def mlp(
    x: Any,
    gate: Any,
    up: Any,
    down: Any,
    *,
    index: Any = None,
    activation: str = "silu",
    norm_weight: Any = None,
    eps: float | None = None,
    residual: Any = None,
    prefetch: Sequence[Any] = (),
    activations: str | None = None,
) -> jax.Array:
    """residual + gated_matmul(x, gate, up) @ dequantize(down).T.

    Args:
      x, gate, up, index, activation, norm_weight, eps, activations: see `gated_matmul`.
      down: QuantizedArray (n, inner) for gate and up (inner, k), or a float array; with `index`, a
        stack with the same number of layers.
      residual: (..., n) or None.
      prefetch: see `linear`. The launch of gate and up always prefetches `down`.

    Returns:
      (..., n) of x's dtype. Differentiable like the chain of `rms_norm` and `matmul`.

    Raises:
      TypeError, ValueError: see `gated_matmul`.
    """
    x, activations = checks.float_array("x", x), activations_of(activations)
    named = checks.weights({"gate": gate, "up": up, "down": down}, index)
    weights = gate, up, down = tuple(named.values())
    linear.check_gate(activation, gate, up)
    (inner, k), (n, _) = gate.shape, down.shape
    linear.check_columns(x, "gate", gate)
    if down.shape[1] != inner:
        raise ValueError(
            f"down has shape {down.shape}; it must be (n, {inner}), as gate is {gate.shape}"
        )
    *leading, _ = x.shape
    leading_rows = Rows.of(x)
    if residual is not None:
        residual = checks.float32("residual", residual, (*leading, n), "(..., n)")
        residual = leading_rows.merge(residual)
    if norm_weight is not None:
        norm_weight = checks.float32("norm_weight", norm_weight, (k,), "(k,)")
    checked = 0.0 if norm_weight is None else checks.epsilon("eps", eps)
    rows = leading_rows.merge(x).astype(jnp.float32)
    if (
        rows.shape[0]
        and all(isinstance(w, Packed) and w.shape[0] for w in weights)
        and current_selection().fuses("mlp")
    ):
        operands = Operands(rows, residual, norm_weight, gate, up, down)
        params = {"eps": checked, "activation": activation, "activations": activations}
        y = op.bind(*operands, prefetch=prefetched((down, *prefetch)), **params)
    else:
        h = linear.gated_matmul(
            rows,
            gate,
            up,
            activation=activation,
            norm_weight=norm_weight,
            eps=checked,
            activations=activations,
        )
        (y,) = linear.linear(
            h, (down,), residual=residual, prefetch=prefetch, activations=activations
        )
    return leading_rows.split(y).astype(x.dtype)


class Operands(NamedTuple):
    """The primitive's operands; all but the weights are float32."""

    x: jax.Array  # (m, k)
    residual: jax.Array | None  # (m, n)
    norm_weight: jax.Array | None  # (k,)
    gate: Any  # packed (inner, k), like `up`
    up: Any
    down: Any  # packed (n, inner)

    def gated(self) -> linear_op.Operands:
        """Returns the operands of the gate and up projections."""
        return linear_op.Operands(
            self.x, None, self.norm_weight, (self.gate, self.up), (None, None)
        )

    def last(self, h: jax.Array) -> linear_op.Operands:
        """Returns the operands of the down projection of h, which is activation(gate, up)."""
        return linear_op.Operands(h, self.residual, None, (self.down,), (None,))


def _chain(operands: Operands, eps: float, activation: str, steps: linear_op.Steps) -> jax.Array:
    """Runs the operation as separate steps: norm, gate and up, activation, down, residual."""
    (h,) = linear_op.chain(operands.gated(), eps, activation, steps)
    (y,) = linear_op.chain(operands.last(h), 0.0, None, steps)
    return y


def reference(*operands: Any, eps: float, activation: str, activations: str | None) -> jax.Array:
    """The operation in plain JAX."""
    return _chain(Operands(*operands), eps, activation, linear_op.reference_steps(activations))


def ptx(
    launch: KernelCall,
    *operands: Any,
    eps: float,
    activation: str,
    activations: str | None,
    prefetch: Sequence[Packed] = (),
) -> jax.Array:
    """The operation by PTX kernels; gate and up's kernel writes the format that `down` takes.

    prefetch: `down`, then the weights of the next operation.
    """
    x, residual, norm_weight, gate, up, down = args = Operands(*operands)
    m, inner = x.shape[0], gate.shape[0]
    of_pair = select_matmul_kernel([gate, up], m, activations, gated=True)
    last = select_matmul_kernel([down], m, activations)
    if of_pair is None:
        return _chain(args, eps, activation, linear_op.ptx_steps(launch, activations))
    output = "f32"
    if decoded.products in (of_pair, last):
        output = "rows" if of_pair is last else "f32"
    elif activations != "f32" and last is not None:
        from ptx_kernels.tuning import current_device

        output = gemm.quantized_to([down], m, activations)
        whole = not inner % {"q8_1": GROUP, "f16": SUPER_BLOCK}[output]
        # thread blocks that share a scale of f16 rows are a cluster
        output = output if whole and (output == "q8_1" or current_device().clusters) else "f32"
    epilogue: dict[str, Any] = {"norm_weight": norm_weight, "eps": eps, "activation": activation}
    h = of_pair(asking(launch, prefetch[:1], m), x, [gate, up], output=output, **epilogue)
    if output == "rows":
        (y,) = decoded.products(launch, h[0], [down], residual=residual)
    elif output != "f32" and last is not None:
        (y,) = last(asking(launch, prefetch[1:], m), h, [down], residual=residual)
    else:
        options: dict[str, Any] = {"activations": activations, "prefetch": prefetch[1:]}
        (y,) = linear_op.ptx(launch, *args.last(h[0]), **options)
    return y


def native(*operands: Any, eps: float, activation: str, activations: str | None) -> jax.Array:
    """The operation by one call of the native kernels; `activations` None means q8_1."""
    x, residual, norm_weight, gate, up, down = Operands(*operands)
    (m, k), inner = x.shape, gate.shape[0]
    return calls.mlp(
        x,
        gate,
        up,
        down,
        quantized=(
            packed_matmul.quantizes_natively([gate, up], m, k, activations),
            packed_matmul.quantizes_natively([down], m, inner, activations),
        ),
        activation=activation,
        norm_weight=norm_weight,
        eps=eps,
        residual=residual,
    )


def _derivative(*operands: Any, eps: float, activation: str, activations: str | None) -> jax.Array:
    return _chain(Operands(*operands), eps, activation, linear_op.public_steps(activations))


def _layout(*operands: Any, **_: Any) -> Layout:
    """Returns the Layout; the inner axis is f in gate and up, and g in down.

    The names differ, as a shard boundary of f may cut quantization blocks of down.
    """
    args = Operands(*operands)
    inner = axes(args.gate, "f _"), axes(args.up, "f _")
    others = "m _", "m n", "_"
    return Layout((*others, *inner, axes(args.down, "n g")), "m n", combined="f g")


def split(
    parts: Parts, call: Any, *operands: Any, eps: float, activation: str, activations: str | None
) -> jax.Array:
    """Runs a device's shard of the inner axis; adds the residual after the sum over devices.

    If only gate and up, or only down, are split along the inner axis, that axis of the activations
    is gathered or sliced.
    """
    args = Operands(*operands)
    params = {"activation": activation, "activations": activations}
    if parts.alike("f", "g"):
        y: jax.Array = call(op, *args._replace(residual=None), eps=eps, **params)
        return linear_op.plus(parts.sum(y, "g"), None, args.residual)
    (h,) = call(linear_op.op, *args.gated(), eps=eps, **params)
    h = parts.along(h, "f", "g")
    params["activation"] = None
    (y,) = call(linear_op.op, *args._replace(residual=None).last(h), eps=0.0, **params)
    return linear_op.plus(parts.sum(y, "g"), None, args.residual)


def _shapes(x: Any, *weights: Any, **_: Any) -> Any:
    return jax.ShapeDtypeStruct((x.shape[0], weights[-1].shape[0]), jnp.float32)


#: The primitive.
op = Op(
    "mlp",
    reference,
    shapes=_shapes,
    ptx=ptx,
    native=native,
    vmap=functools.partial(by_rows, operands=2),  # x and the residual
    derivative=_derivative,
    layout=_layout,
    split=split,
)
