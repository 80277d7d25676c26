"""Defines the primitive of linear layers, which multiplies activations by several matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ptx_kernels.limits import router_takes

from ..arrays.indexed import Packed, axes
from ..native import calls
from ..sharding.layout import Layout, Parts
from . import float_matmul, gemv, packed_matmul, rms_norm
from .gates import ACTIVATION_FUNCTIONS
from .op import KernelCall, Op
from .prefetch import asking
from .select_kernel import select_matmul_kernel
from .vmaps import by_rows


class Operands(NamedTuple):
    """The primitive's operands; all but the weights are float32."""

    x: jax.Array  # (m, k)
    residual: jax.Array | None  # (m, n), only with a single matrix
    norm_weight: jax.Array | None  # (k,)
    weights: tuple[Any, ...]  # packed (n_i, k), none or all in stacks; or small float32 matrices
    biases: tuple[jax.Array | None, ...]  # (n_i,)


def is_router(operands: Operands) -> bool:
    """Returns whether the weights are small float32 matrices, a router's, and x has few rows."""
    x, residual, _, weights, _ = operands
    if residual is not None or any(
        isinstance(w, Packed) or w.dtype != jnp.float32 or not w.shape[0] for w in weights
    ):
        return False
    return router_takes(sum(w.shape[0] for w in weights), weights[0].shape[1], x.shape[0])


class Steps(NamedTuple):
    """Functions for a norm and a matmul, of which a linear layer is composed."""

    norm: Callable[[jax.Array, jax.Array, float], jax.Array]  # (x, weight, eps) -> RMSNorm
    product: Callable[[jax.Array, Any], jax.Array]  # (x (m, k), w (n, k)) -> (m, n)


def chain(
    operands: Operands, eps: float, activation: str | None, steps: Steps
) -> tuple[jax.Array, ...]:
    """Runs the operation as separate steps: norm, matmuls, then activation or bias and residual."""
    x, residual, norm_weight, weights, biases = operands
    h = x if norm_weight is None else steps.norm(x, norm_weight, eps)
    ys = [steps.product(h, w) for w in weights]
    if activation is not None:
        return (ACTIVATION_FUNCTIONS[activation](*ys),)
    return tuple(plus(y, bias, residual) for y, bias in zip(ys, biases, strict=True))


def plus(y: jax.Array, bias: jax.Array | None, residual: jax.Array | None) -> jax.Array:
    """residual + (y + bias), without the terms that are None."""
    y = y if bias is None else y + bias
    return y if residual is None else residual + y


def _or_of_floats(product: Callable[[jax.Array, Any], jax.Array]) -> Any:
    """Returns a matmul function: `product` for packed matrices, XLA's matmul for float ones."""
    return lambda x, w: (product if isinstance(w, Packed) else float_matmul.reference)(x, w)


def reference_steps(activations: str | None) -> Steps:
    """Returns Steps whose functions are plain JAX."""
    return Steps(
        lambda x, weight, eps: rms_norm.reference(x, weight, eps=eps),
        _or_of_floats(functools.partial(packed_matmul.reference, activations=activations)),
    )


def ptx_steps(launch: KernelCall, activations: str | None) -> Steps:
    """Returns Steps whose functions each launch PTX kernels."""
    return Steps(
        lambda x, weight, eps: rms_norm.ptx(launch, x, weight, eps=eps),
        _or_of_floats(functools.partial(packed_matmul.ptx, launch, activations=activations)),
    )


def public_steps(activations: str | None) -> Steps:
    """Returns Steps whose functions are differentiable operations of this package."""
    return Steps(
        lambda x, weight, eps: rms_norm.rms_norm(x, weight, eps=eps),
        lambda x, w: product(x, w, activations),
    )


def product(x: jax.Array, w: Any, activations: str | None) -> jax.Array:
    """x (m, k) times a packed or float w (n, k) transposed, of x's dtype; m and n may be 0."""
    if not x.shape[0] or not w.shape[0]:
        return jnp.zeros((x.shape[0], w.shape[0]), x.dtype)
    if isinstance(w, Packed):
        return packed_matmul.packed_matmul(x, w, activations)
    return float_matmul.float_matmul(x, w)


def reference(
    *operands: Any, eps: float, activation: str | None, activations: str | None
) -> tuple[jax.Array, ...]:
    """The operation in plain JAX."""
    return chain(Operands(*operands), eps, activation, reference_steps(activations))


def ptx(
    launch: KernelCall,
    *operands: Any,
    eps: float = 0.0,
    activation: str | None = None,
    activations: str | None,
    prefetch: Sequence[Packed] = (),
) -> Sequence[jax.Array]:
    """Launches one kernel for all matrices if there is such a kernel, else one for each step.

    `activations` None selects the fastest format.
    """
    x, residual, norm_weight, weights, biases = args = Operands(*operands)
    launch = asking(launch, prefetch, x.shape[0])
    if activation is None and is_router(args):
        return gemv.router(launch, x, weights, norm_weight, eps, biases)
    product = None
    if isinstance(weights[0], Packed):
        is_gated = activation is not None
        product = select_matmul_kernel(weights, x.shape[0], activations, gated=is_gated)
    if product is None:
        return chain(args, eps, activation, ptx_steps(launch, activations))
    return product(
        launch,
        x,
        weights,
        norm_weight=norm_weight,
        eps=eps,
        biases=biases,
        residual=residual,
        activation=activation,
    )


def native(
    *operands: Any, eps: float = 0.0, activation: str | None = None, activations: str | None
) -> Sequence[jax.Array]:
    """The operation by one native call for all matrices; `activations` None means q8_1."""
    x, residual, norm_weight, weights, biases = Operands(*operands)
    return calls.linear(
        x,
        weights,
        quantized=isinstance(weights[0], Packed)
        and packed_matmul.quantizes_natively(weights, x.shape[0], x.shape[1], activations),
        norm_weight=norm_weight,
        eps=eps,
        biases=biases,
        residual=residual,
        activation=activation,
    )


def _derivative(
    *operands: Any, eps: float, activation: str | None, activations: str | None
) -> tuple[jax.Array, ...]:
    return chain(Operands(*operands), eps, activation, public_steps(activations))


def _shapes(
    x: Any, _: Any, __: Any, weights: Any, ___: Any, *, activation: Any, **____: Any
) -> Any:
    results = weights if activation is None else weights[:1]
    return tuple(jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32) for w in results)


def _layout(*operands: Any, activation: str | None, **_: Any) -> Layout:
    """Returns the Layout; each matrix's rows may be split separately, except gate and up."""
    weights = Operands(*operands).weights
    count = len(weights)
    names = _row_names(count) if activation is None else ["n"] * count
    results = tuple(f"m {n}" for n in (names if activation is None else names[:1]))
    rows = tuple(axes(w, f"{n} k") for w, n in zip(weights, names, strict=True))
    # With several matrices, a call must not return replicated and split results together.
    combined = " ".join(["k", *names]) if activation is None and count > 1 else "k"
    return Layout(("m k", f"m {names[0]}", "k", rows, tuple(names)), results, combined)


def _row_names(count: int) -> list[str]:
    return [f"n{i}" for i in range(count)]


def split(
    parts: Parts, call: Any, *operands: Any, eps: float, activation: str | None, **params: Any
) -> Sequence[jax.Array]:
    """Sums norm and matmuls over devices if k is sharded, then adds bias and residual.

    If only the matrices' rows are sharded, makes one call, or one call per matrix if the matrices
    are split differently.
    """
    x, residual, norm_weight, weights, biases = args = Operands(*operands)
    if not parts.split("k"):
        options = {"eps": eps, "activation": activation, **params}
        if parts.alike(*_row_names(len(weights))):
            ys: Sequence[jax.Array] = call(op, *args, **options)
            return ys
        pairs = zip(weights, biases, strict=True)
        singles = (args._replace(weights=(w,), biases=(bias,)) for w, bias in pairs)
        return [call(op, *single, **options)[0] for single in singles]
    if norm_weight is not None:
        x = rms_norm.split(parts, None, x, norm_weight, eps=eps)

    def product(x: jax.Array, w: Any) -> jax.Array:
        absent = Operands(x, None, None, (w,), (None,))
        (y,) = call(op, *absent, eps=0.0, activation=None, **params)
        total: jax.Array = parts.sum(y, "k")
        return total

    rest = Operands(x, residual, None, weights, biases)
    return chain(rest, 0.0, activation, Steps(lambda x, *_: x, product))


#: The primitive of all these functions.
op = Op(
    "linear",
    reference,
    shapes=_shapes,
    ptx=ptx,
    native=native,
    vmap=functools.partial(by_rows, operands=2),  # x and the residual
    derivative=_derivative,
    layout=_layout,
    split=split,
)
