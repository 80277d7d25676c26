"""Linear layers, [residual +] [rms_norm](x) @ w.T [+ bias], with packed or float weights.

A layer has one matrix, several matrices, or a gate and an up projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays.indexed import Packed
from ..arrays.transposed import TransposedArray
from ..selection import activations_of, current_selection
from ..sharding.layout import Rows
from . import checks
from .gates import check_activation
from .linear_op import Operands, chain, is_router, op, product, public_steps
from .prefetch import prefetched


def matmul(
    x: Any,
    w: Any,
    *,
    index: Any = None,
    bias: Any = None,
    residual: Any = None,
    activations: str | None = None,
) -> jax.Array:
    """y = residual + x @ dequantize(w).T + bias, accumulated in float32.

    A NaN or Inf in a row of `x` reaches that row of y only.

    Differentiable in `x`, any number of times, in forward and reverse mode: dy = dx @
    dequantize(w).T, and its transpose dx = dy @ dequantize(w), accumulated in float32 and never
    quantized. The rounding of `q8_1` has a straight-through gradient. A packed `w` stays packed
    between the passes and is a constant: `jax.grad` with respect to it raises JAX's error for
    integers; with `allow_int=True` its planes' gradients are float0.

    Args:
      x: (..., k) float32, bfloat16 or float16.
      w: QuantizedArray (n, k), or a float array (n, k) of one of these dtypes. Differentiable in a
        float array.
      index: an integer, traced or not, that selects matrix `index` of a stack `w` (layers, n, k).
        Kernels read a packed matrix in place: a loop over layers copies none, as it would with
        `w[index]`. Negative values count from the end. A traced index out of range is clamped, as
        by `jax.lax.dynamic_index_in_dim`.
      bias: (n,) float array, or None. residual: (..., n) float array, or None.
      activations: `f32`: x is not quantized; on CUDA, mat-vecs of packed weights multiply up to
        eight rows, and XLA multiplies more by decoded weights. `q8_1`: x is quantized to int8 in
        groups of 32, on every implementation, wherever the CUDA path has a kernel for it: for up to
        eight rows (under `vmap`, of all examples together), and for more if k is a multiple of 64.
        None: the selection of `jax_q4k.implementation`, else `f32` for xla, int8 for native (for
        any number of rows if k is a multiple of 64), and the fastest for ptx and sim. The fastest
        is `q8_1`, or for many rows on some GPUs x rounded to float16, with a power of two per 256
        columns of a row. For so many rows that XLA's product is faster, x and the decoded weights
        are rounded to float16, with a power of two per row.

    Returns:
      (..., n) of x's dtype.

    Raises:
      TypeError: a dtype that is not listed. ValueError: shapes that don't fit, an unknown name.
      IndexError: an index out of range that is known at tracing.
    """
    biases = None if bias is None else (bias,)
    (y,) = linear(x, (w,), index=index, biases=biases, residual=residual, activations=activations)
    return y


TransposedArray.matmul = staticmethod(matmul)


def rms_norm_matmul(
    x: Any,
    norm_weight: Any,
    w: Any,
    *,
    eps: float,
    index: Any = None,
    bias: Any = None,
    residual: Any = None,
    activations: str | None = None,
) -> jax.Array:
    """residual + rms_norm(x, norm_weight) @ dequantize(w).T + bias, accumulated in float32.

    Args:
      x: (..., k) float32, bfloat16 or float16.
      norm_weight, eps: (k,) and a float, see `rms_norm`.
      w: QuantizedArray (n, k), or a float array.
      index: see `matmul`.
      bias: (n,) or None. residual: (..., n) or None.
      activations: see `matmul`.

    Returns:
      (..., n) of x's dtype. Differentiable like the chain of `rms_norm` and `matmul`.

    Raises:
      TypeError: a dtype that is not listed. ValueError: shapes that don't fit, an unknown name.
    """
    (y,) = _linear(
        "rms_norm_matmul",
        x,
        (w,),
        index=index,
        norm=(norm_weight, eps),
        biases=None if bias is None else (bias,),
        residual=residual,
        activations=activations,
    )
    return y


def qkv_matmul(
    x: Any,
    weights: Sequence[Any],
    *,
    index: Any = None,
    norm_weight: Any = None,
    eps: float | None = None,
    biases: Sequence[Any] | None = None,
    activations: str | None = None,
) -> tuple[jax.Array, ...]:
    """`[rms_norm](x) @ dequantize(w).T [+ bias]` for each w, accumulated in float32.

    Attention's projections to Q, K and V are an example.

    Args:
      x: (..., k) float32, bfloat16 or float16.
      weights: QuantizedArrays (n_i, k), whose formats may differ, or float arrays.
      index: see `matmul`; all stacks have the same number of layers.
      norm_weight: (k,), the weight of an `rms_norm` of x with `eps`; None means no norm.
      biases: (n_i,) or None for each matrix; None means no biases.
      activations: see `matmul`.

    Returns:
      One (..., n_i) of x's dtype per matrix. Differentiable like the chain of `rms_norm` and
      `matmul`.

    Raises:
      TypeError: a dtype that is not listed. ValueError: shapes that don't fit, an unknown name,
        norm_weight without eps.
    """
    norm = None if norm_weight is None else (norm_weight, eps)
    return _linear(
        "qkv_matmul", x, weights, index=index, norm=norm, biases=biases, activations=activations
    )


def gated_matmul(
    x: Any,
    gate: Any,
    up: Any,
    *,
    index: Any = None,
    activation: str = "silu",
    norm_weight: Any = None,
    eps: float | None = None,
    activations: str | None = None,
) -> jax.Array:
    """activation(x @ dequantize(gate).T, x @ dequantize(up).T), accumulated in float32.

    Args:
      x: (..., k) float32, bfloat16 or float16.
      gate, up: QuantizedArrays (n, k), whose formats may differ, or float arrays.
      index: see `matmul`; both stacks have the same number of layers.
      activation: one of `jax_q4k.ACTIVATION_FUNCTIONS`: `silu` (SwiGLU: silu(gate) * up), `gelu`
        (GEGLU, with the tanh approximation) or `swiglu_oai` (gpt-oss).
      norm_weight: (k,), the weight of an `rms_norm` of x with `eps`; None means no norm.
      activations: see `matmul`.

    Returns:
      (..., n) of x's dtype. Differentiable like the chain of `rms_norm` and `matmul`.

    Raises:
      TypeError: a dtype that is not listed. ValueError: shapes that don't fit, an unknown name,
        norm_weight without eps.
    """
    norm = None if norm_weight is None else (norm_weight, eps)
    (y,) = _linear(
        "gated_matmul",
        x,
        (gate, up),
        names=("gate", "up"),
        index=index,
        norm=norm,
        activation=activation,
        activations=activations,
    )
    return y


def linear(
    x: Any,
    weights: Sequence[Any],
    *,
    index: Any = None,
    norm_weight: Any = None,
    eps: float | None = None,
    biases: Sequence[Any] | None = None,
    residual: Any = None,
    prefetch: Sequence[Any] = (),
    activations: str | None = None,
) -> tuple[jax.Array, ...]:
    """Linear layer: `[residual +] [rms_norm](x) @ dequantize(w).T [+ bias]` for each w.

    Products are accumulated in float32. The terms in brackets are optional.

    Args:
      x: (..., k) float32, bfloat16 or float16.
      weights: at least one QuantizedArray (n_i, k), whose formats may differ, or float array.
      index: see `matmul`; all stacks have the same number of layers.
      norm_weight: (k,), the weight of an `rms_norm` of x with `eps`; None means no norm.
      biases: (n_i,) or None for each matrix; None means no biases.
      residual: (..., n), only with a single matrix, or None.
      prefetch: weights that the program's next operation reads. On GPUs from sm_90, launches for up
        to eight rows end by prefetching some MB of the packed ones into the L2 cache. No result
        depends on it. Ignored if operands are on several devices.
      activations: see `matmul`.

    Returns:
      One (..., n_i) of x's dtype per matrix. Differentiable like the chain of `rms_norm` and
      `matmul`.

    Raises:
      TypeError: a dtype that is not listed. ValueError: shapes that don't fit, an unknown name,
        norm_weight without eps.
    """
    weights = tuple(weights)
    norm = None if norm_weight is None else (norm_weight, eps)
    name = "qkv_matmul" if len(weights) > 1 else "matmul" if norm is None else "rms_norm_matmul"
    return _linear(
        name,
        x,
        weights,
        index=index,
        norm=norm,
        biases=biases,
        residual=residual,
        prefetch=prefetch,
        activations=activations,
    )


def check_gate(activation: Any, gate: Any, up: Any) -> None:
    """Raises ValueError for an unknown activation, or for gate and up of different shapes."""
    check_activation(activation)
    checks.same_shape("up", up, gate.shape, "gate's shape")


def check_columns(x: jax.Array, name: str, w: Any) -> None:
    """Raises ValueError unless x is (..., k) and the matrix (n, k)."""
    if x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"x has shape {x.shape}; its last axis must be k={w.shape[1]}, as in {name} {w.shape}"
        )


def _linear(
    name: str,
    x: Any,
    weights: Sequence[Any],
    *,
    names: tuple[str, ...] = (),
    index: Any = None,
    norm: tuple[Any, float | None] | None,
    biases: Sequence[Any] | None = None,
    residual: Any = None,
    activation: str | None = None,
    prefetch: Sequence[Any] = (),
    activations: str | None,
) -> tuple[jax.Array, ...]:
    """Implements `linear`, or `gated_matmul` if `activation` is not None.

    `name`: the operation's name in FUSIONS. `names`: names of the weights in messages.
    """
    x, activations = checks.float_array("x", x), activations_of(activations)
    named = _weights(tuple(weights), names, index)
    weights = tuple(named.values())
    if name == "gated_matmul":
        check_gate(activation, *weights)
    for matrix, w in named.items():
        check_columns(x, matrix, w)
    rows = Rows.of(x)
    operands = checked_operands(x, rows, weights, norm, biases, residual)
    packed = all(isinstance(w, Packed) and w.shape[0] for w in weights)
    # one kernel computes all of it
    one = packed or (activation is None and is_router(operands))
    eps = 0.0 if norm is None else checks.epsilon("eps", norm[1])
    terms = (activation, operands.residual, operands.norm_weight, *operands.biases)
    ys: Sequence[jax.Array]
    prefetched_weights = prefetched(prefetch)
    if len(weights) == 1 and all(term is None for term in terms) and not prefetched_weights:
        ys = [product(operands.x, weights[0], activations)]
    else:
        operands = operands._replace(x=operands.x.astype(jnp.float32))
        if one and operands.x.shape[0] and current_selection().fuses(name):
            params = {"eps": eps, "activation": activation, "activations": activations}
            ys = op.bind(*operands, prefetch=prefetched_weights, **params)
        else:
            ys = chain(operands, eps, activation, public_steps(activations))
    return tuple(rows.split(y).astype(x.dtype) for y in ys)


def _weights(weights: tuple[Any, ...], names: tuple[str, ...], index: Any) -> dict[str, Any]:
    """Checks the matrices; maps their names in messages to them."""
    if not weights:
        raise ValueError("weights=() must hold at least one matrix")
    if not names:
        names = tuple(f"weights[{i}]" for i in range(len(weights))) if weights[1:] else ("w",)
    return checks.weights(dict(zip(names, weights, strict=True)), index)


def checked_operands(
    x: jax.Array,
    rows: Rows,
    weights: tuple[Any, ...],
    norm: tuple[Any, float | None] | None,
    biases: Sequence[Any] | None,
    residual: Any,
) -> Operands:
    """Checks norm, biases and residual; returns the primitive's operands, with x's own dtype."""
    *leading, k = x.shape
    several, n = len(weights) > 1, weights[0].shape[0]
    if residual is not None:
        if several:
            raise ValueError(f"residual needs a single matrix, not {len(weights)}")
        residual = checks.float32("residual", residual, (*leading, n), "(..., n)")
        residual = rows.merge(residual)
    biases = (None,) * len(weights) if biases is None else tuple(biases)
    if len(biases) != len(weights):
        raise ValueError(
            f"biases has {len(biases)} elements; it must have one for each of {len(weights)} "
            "matrices"
        )
    named = ((f"biases[{i}]" if several else "bias", b) for i, b in enumerate(biases))
    return Operands(
        rows.merge(x),
        residual,
        None if norm is None else checks.float32("norm_weight", norm[0], (k,), "(k,)"),
        weights,
        tuple(
            None if bias is None else checks.float32(name, bias, w.shape[:1], "(n,)")
            for (name, bias), w in zip(named, weights, strict=True)
        ),
    )
