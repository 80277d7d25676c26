"""Matrix products with what stands around them in a decoder: RMSNorm before, biases and a residual
after.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ptx_kernels import tuning
from ptx_kernels.kernels.matvec import MAX_MATRICES, MAX_ROWS, MatvecConfig, matvec, qkv_matvec

from ..arrays import QuantizedArray
from ..implementation import check_selection, current_selection
from ..native import calls
from . import checks, matmul, quantize_q8_1, rms_norm
from .op import KernelCall, Op

#: (x float32 (m, k), packed weights) -> x @ dequantize(w).T, and (x, weight, eps) -> RMSNorm.
Product = Callable[[jax.Array, Any], jax.Array]
Norm = Callable[[jax.Array, jax.Array, float], jax.Array]


def rms_norm_matmul(
    x: Any,
    norm_weight: Any,
    w: Any,
    *,
    eps: float,
    bias: Any = None,
    residual: Any = None,
    activations: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """residual + rms_norm(x, norm_weight) @ dequantize(w).T + bias, accumulated in float32.

    Args:
      x: (..., k) float32, bfloat16 or float16.
      norm_weight: (k,), as `rms_norm` takes it, and eps.
      w: QuantizedArray (n, k), or a float array.
      bias: (n,) or None. residual: (..., n) or None.
      activations, implementation: as `matmul` takes them.

    Returns:
      (..., n) of x's dtype. Differentiable as the chain of `rms_norm` and `matmul` is.

    Raises:
      TypeError: a dtype that is not listed. ValueError: shapes that don't fit, an unknown name.
    """
    biases = None if bias is None else (bias,)
    norm = norm_weight, eps
    (y,) = products("rms_norm_matmul", x, (w,), norm, biases, residual, activations, implementation)
    return y


def qkv_matmul(
    x: Any,
    weights: Sequence[Any],
    *,
    norm_weight: Any = None,
    eps: float | None = None,
    biases: Sequence[Any] | None = None,
    activations: str | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Products of the same activations with several matrices, such as attention's projections to Q,
    K and V.

    Args:
      x: (..., k) float32, bfloat16 or float16.
      weights: QuantizedArrays (n_i, k), whose formats may differ, or float arrays.
      norm_weight: (k,): x is normalized first, with `eps`; None: as it is.
      biases: for every matrix (n_i,) or None; None: none has one.
      activations, implementation: as `matmul` takes them.

    Returns:
      One (..., n_i) of x's dtype per matrix. Differentiable as the chain of `rms_norm` and `matmul`
      is.

    Raises:
      TypeError: a dtype that is not listed. ValueError: shapes that don't fit, an unknown name,
        norm_weight without eps.
    """
    norm = None if norm_weight is None else (norm_weight, eps)
    return products(
        "qkv_matmul", x, tuple(weights), norm, biases, None, activations, implementation
    )


class Operands(NamedTuple):
    """What the primitive takes, as a pytree; all but the weights float32."""

    x: jax.Array  # (m, k)
    residual: jax.Array | None  # (m, n), of a single matrix
    norm_weight: jax.Array | None  # (k,)
    weights: tuple[Any, ...]  # packed (n_i, k)
    biases: tuple[jax.Array | None, ...]  # (n_i,)


def products(
    name: str,
    x: Any,
    weights: tuple[Any, ...],
    norm: tuple[Any, float | None] | None,
    biases: Sequence[Any] | None,
    residual: Any,
    activations: str | None,
    implementation: str | None,
) -> tuple[jax.Array, ...]:
    """[residual +] [rms_norm](x) @ dequantize(w).T [+ bias] for each w; `name`: which of FUSIONS
    the caller is.
    """
    x = checks.float_array("x", x)
    chosen = (
        check_selection(implementation, activations).activations or current_selection().activations
    )
    weights = tuple(
        checks.weight(f"weights[{i}]" if len(weights) > 1 else "w", w)
        for i, w in enumerate(weights)
    )
    if not weights:
        raise ValueError("weights=() must hold at least one matrix")
    if x.ndim < 1 or any(x.shape[-1] != w.shape[1] for w in weights):
        raise ValueError(
            f"x has shape {x.shape}; its last axis must be k of w {[w.shape for w in weights]}"
        )
    *leading, k = x.shape
    m = math.prod(leading)
    biases = (None,) * len(weights) if biases is None else tuple(biases)
    if len(biases) != len(weights):
        raise ValueError(
            f"biases has {len(biases)} elements; it must have one for each of {len(weights)} matrices"
        )
    shape = (*leading, weights[0].shape[0])
    operands = Operands(
        x.reshape(m, k).astype(jnp.float32),
        None
        if residual is None
        else checks.float32("residual", residual, shape, "(..., n)").reshape(m, shape[-1]),
        None if norm is None else checks.float32("norm_weight", norm[0], (k,), "(k,)"),
        weights,
        tuple(
            None
            if b is None
            else checks.float32(
                f"biases[{i}]" if len(weights) > 1 else "bias", b, w.shape[:1], "(n,)"
            )
            for i, (b, w) in enumerate(zip(biases, weights, strict=True))
        ),
    )
    eps = 0.0 if norm is None else checks.epsilon("eps", norm[1])
    fusible = m and all(isinstance(w, QuantizedArray) and w.shape[0] for w in weights)
    if fusible and current_selection().fuses(name):
        leaves, tree = jax.tree.flatten(operands)
        ys = _op.bind(
            *leaves, tree=tree, eps=eps, activations=chosen, implementation=implementation
        )
    else:
        ys = chain(operands, eps, *public_steps(chosen, implementation))
    return tuple(y.reshape(*leading, y.shape[-1]).astype(x.dtype) for y in ys)


def chain(operands: Operands, eps: float, norm: Norm, product: Product) -> list[jax.Array]:
    """The operation step by step."""
    x, residual, norm_weight, weights, biases = operands
    h = x if norm_weight is None else norm(x, norm_weight, eps)
    ys = [product(h, w) for w in weights]
    ys = [y if bias is None else y + bias for y, bias in zip(ys, biases, strict=True)]
    return ys if residual is None else [residual + y for y in ys]


def reference(
    *leaves: jax.Array, tree: Any, eps: float, activations: str | None
) -> list[jax.Array]:
    """The operation in plain JAX."""
    return chain(jax.tree.unflatten(tree, leaves), eps, *reference_steps(activations))


def kernels(
    launch: KernelCall, *leaves: jax.Array, tree: Any, eps: float, activations: str | None
) -> list[jax.Array]:
    """The operation by PTX kernels; `activations` None: whichever is fastest."""
    return by_kernels(launch, jax.tree.unflatten(tree, leaves), eps, activations)


def by_kernels(
    launch: KernelCall, operands: Operands, eps: float, activations: str | None
) -> list[jax.Array]:
    """One mat-vec of all matrices where there is one, else a kernel for each step."""
    x, residual, norm_weight, weights, biases = operands
    (m, columns), rows = x.shape, tuple(w.shape[0] for w in weights)
    if activations == "f32" or not joinable(weights, m):
        return chain(operands, eps, *kernel_steps(launch, activations))
    formats = tuple(w.format for w in weights)
    config = tuning.fused_matvec(formats, rows, columns, m, floats=True)
    given, norm = activation_operands(launch, config, x, norm_weight, eps)
    if len(weights) == 1:
        return one_matvec(launch, weights[0], given, biases[0], residual, config, **norm)
    planes = [plane for w in weights for plane in w.planes]
    has_bias = any(bias is not None for bias in biases)
    addends = (
        [jnp.zeros(n) if b is None else b for b, n in zip(biases, rows, strict=True)]
        if has_bias
        else []
    )
    kernel = qkv_matvec(
        formats=formats, rows=rows, columns=columns, m=m, biases=has_bias, config=config, **norm
    )
    return launch(kernel, *planes, *given, *addends)


def one_matvec(
    launch: KernelCall,
    w: QuantizedArray,
    given: Sequence[jax.Array],
    bias: jax.Array | None,
    residual: jax.Array | None,
    config: MatvecConfig,
    **norm: Any,
) -> list[jax.Array]:
    """The mat-vec of `given`: x (m, k) as `config` takes it, int8 with scales or f32, and what
    `norm` needs.
    """
    n, columns = w.shape
    kernel = matvec(
        format=w.format,
        n=n,
        columns=columns,
        m=given[0].shape[0],
        bias=bias is not None,
        residual=residual is not None,
        config=config,
        **norm,
    )
    return launch(
        kernel, *w.planes, *given, *(addend for addend in (bias, residual) if addend is not None)
    )


def native(*leaves: jax.Array, tree: Any, eps: float, activations: str | None) -> list[jax.Array]:
    """The operation by the CPU's kernels; `activations` None means q8_1."""
    return by_native(jax.tree.unflatten(tree, leaves), eps, activations)


def by_native(operands: Operands, eps: float, activations: str | None) -> list[jax.Array]:
    """One call of all matrices."""
    x, residual, norm_weight, weights, biases = operands
    quantized = activations != "f32" and all(matmul.takes_q8_1(w.format, *x.shape) for w in weights)
    return calls.products(
        x,
        weights,
        quantized=quantized,
        norm_weight=norm_weight,
        eps=eps,
        biases=biases,
        residual=residual,
    )


def joinable(weights: Sequence[QuantizedArray], m: int) -> bool:
    """Whether a mat-vec takes these matrices and m rows of activations."""
    return (
        m <= MAX_ROWS
        and len(weights) <= MAX_MATRICES
        and all(w.format in matmul.DOT_FORMATS for w in weights)
    )


def activation_operands(
    launch: KernelCall,
    config: MatvecConfig,
    x: jax.Array,
    norm_weight: jax.Array | None,
    eps: float,
) -> tuple[list[jax.Array], dict[str, Any]]:
    """The operands by which a mat-vec of `config` gets [rms_norm](x), and its arguments that say
    so.

    Either it makes int8 of x itself, or a kernel before does.
    """
    if config.activations == "inline_q8":
        return ([x], {}) if norm_weight is None else ([x, norm_weight], {"norm": True, "eps": eps})
    if norm_weight is None:
        return quantize_q8_1.kernels(launch, x), {}
    return rms_norm.kernels(launch, x, norm_weight, eps=eps, output="q8_1"), {}


def reference_steps(activations: str | None) -> tuple[Norm, Product]:
    """RMSNorm and product in plain JAX."""

    def product(x: jax.Array, w: QuantizedArray) -> jax.Array:
        return matmul.reference(
            x, *w.planes, format=w.format, activations=activations, transposed=False
        )[0]

    return lambda x, weight, eps: rms_norm.reference(x, weight, eps=eps)[0], product


def kernel_steps(launch: KernelCall, activations: str | None) -> tuple[Norm, Product]:
    """RMSNorm and product by a kernel each."""

    def product(x: jax.Array, w: QuantizedArray) -> jax.Array:
        return matmul.kernels(
            launch, x, *w.planes, format=w.format, activations=activations, transposed=False
        )[0]

    return lambda x, weight, eps: rms_norm.kernels(launch, x, weight, eps=eps)[0], product


def public_steps(activations: str | None, implementation: str | None) -> tuple[Norm, Product]:
    """RMSNorm and product as differentiable operations of their own."""

    def norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
        return rms_norm.rms_norm(x, weight, eps=eps, implementation=implementation)

    return norm, functools.partial(
        matmul.matmul, activations=activations, implementation=implementation
    )


def _abstract_eval(
    *leaves: Any, tree: Any, eps: float, activations: str | None
) -> list[jax.core.ShapedArray]:
    operands: Operands = jax.tree.unflatten(tree, leaves)
    m, _ = operands.x.shape
    return [jax.core.ShapedArray((m, w.shape[0]), jnp.float32) for w in operands.weights]


def row_operands(params: dict[str, Any]) -> int:
    """How many of the leaves have rows: x, and the residual if there is one."""
    tree = params["tree"]
    return 1 + (jax.tree.unflatten(tree, range(tree.num_leaves)).residual is not None)


_op = Op(
    "q4k_fused_matmul",
    abstract_eval=_abstract_eval,
    reference=reference,
    kernels=kernels,
    native=native,
)
_op.define_derivative_of(
    lambda *leaves, tree, eps, activations, implementation: chain(
        jax.tree.unflatten(tree, leaves), eps, *public_steps(activations, implementation)
    )
)
_op.define_vmap_of_rows(row_operands)
