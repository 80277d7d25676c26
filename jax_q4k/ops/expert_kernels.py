"""Products by experts as launches: mat-vecs whose blocks read which matrix is theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ptx_kernels.limits import MAX_ROWS

from ..arrays import QuantizedArray
from ..custom_call import ptx_name
from . import gemv
from .op import KernelCall

MAX_CHOICES = 65535  # blocks along a grid's second axis


def takes(weights: Sequence[Any], tokens: int, top: int) -> bool:
    """True if mat-vecs multiply so many tokens' choices by these stacks (experts, n, k).

    They read a matrix once per choice. Beyond eight tokens that is as little as can be while most
    experts have one choice at most.
    """
    if not all(isinstance(w, QuantizedArray) for w in weights):
        return False
    experts = weights[0].shape[0]
    return tokens <= MAX_ROWS or tokens * top <= min(experts, MAX_CHOICES)


def products(
    launch: KernelCall,
    x: jax.Array,
    ids: jax.Array,
    weights: Sequence[QuantizedArray],
    *,
    norm_weight: jax.Array | None = None,
    eps: float = 0.0,
    biases: Sequence[jax.Array | None] = (),
    activation: str | None = None,
    activations: str | None = None,
    output: Literal["f32", "q8_1"] = "f32",
) -> list[jax.Array]:
    """[rms_norm](x) @ w[id].T of every choice, of one stack or of two that gate each other.

    A launch that normalizes, or quantizes a very long row, goes before it where the mat-vec's
    prologue does not.

    Args:
      x: (m, k); ids: int32 (m, top).
      weights: of shape (experts, n, k); biases: (experts, n) of each or None, of two stacks.

    Returns:
      (m * top, n) float32, or of output q8_1 what `quantize_q8_1` makes of it.
    """
    from ptx_kernels.kernels.matvec import expert_matvec_rule, gated_matvec, matvec
    from ptx_kernels.tuning import choose

    (m, top), (experts, n, columns) = ids.shape, weights[0].shape
    formats, exact = tuple(w.format for w in weights), activations == "f32"
    config = choose(
        expert_matvec_rule,
        formats,
        n,
        columns,
        m * top,
        norm=norm_weight is not None,
        output=output,
        exact=exact,
    )
    operands, norm = gemv.activation_operands(launch, config, x, norm_weight, eps)
    common: dict[str, Any] = {"n": n, "columns": columns, "m": m, "experts": experts, "top": top}
    common |= {"config": config, "output": output, **norm}
    if config.activations != "q8_1":
        common["dtype"] = ptx_name(operands[0].dtype)
    given: list[jax.Array] = []
    if activation is None:
        kernel = matvec(format=formats[0], **common)
    else:
        if any(bias is not None for bias in biases):
            given = [jnp.zeros((experts, n)) if bias is None else bias for bias in biases]
        kernel = gated_matvec(formats=formats, activation=activation, biases=bool(given), **common)
    return launch(kernel, ids, *jax.tree.leaves(list(weights)), *operands, *given)


def mixture(
    launch: KernelCall,
    h: Sequence[jax.Array],
    ids: jax.Array,
    weights: jax.Array,
    down: QuantizedArray,
    *,
    bias: jax.Array | None,
    scale: jax.Array | None,
    residual: jax.Array | None,
    exact: bool,
) -> jax.Array:
    """residual + the sum of each token's choices, weight * (scale * (down[id] @ h) + bias): (m, n).

    Args:
      h: (m * top, k) float32 if `exact`, else as q8_1.
      ids, weights: (m, top); down: (experts, n, k); bias: (experts, n); scale: (experts,);
        residual: (m, n).
    """
    from ptx_kernels.kernels.matvec import mixture_matvec, mixture_matvec_rule
    from ptx_kernels.tuning import choose

    (m, top), (experts, n, columns) = ids.shape, down.shape
    kernel = mixture_matvec(
        format=down.format,
        n=n,
        columns=columns,
        m=m,
        experts=experts,
        top=top,
        biases=bias is not None,
        scales=scale is not None,
        residual=residual is not None,
        config=choose(mixture_matvec_rule, down.format, n, columns, m, exact),
    )
    terms = [term for term in (bias, scale, residual) if term is not None]
    (y,) = launch(kernel, ids, weights, *down.planes, *h, *terms)
    return y
