"""Launches the kernels of expert (MoE) matmuls: mat-vecs for few tokens, tensor cores for more.

Kernels read the expert ids from device memory; the host never sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ptx_kernels.limits import MAX_ROUTED, MAX_ROWS, gemm_takes

from ..arrays import QuantizedArray
from ..custom_call import ptx_name
from . import gemv, quantize_q8_1
from .op import KernelCall

MAX_CHOICES = 65535  # blocks along a grid's second axis


def takes(weights: Sequence[Any], tokens: int, top: int) -> bool:
    """Returns whether mat-vecs multiply these expert stacks (experts, n, k) by `tokens` tokens.

    Each token selects `top` experts. A mat-vec reads a matrix once per selection; beyond eight
    tokens this is minimal as long as most experts are selected at most once.
    """
    if not all(isinstance(w, QuantizedArray) for w in weights):
        return False
    experts = weights[0].shape[0]
    return tokens <= MAX_ROWS or tokens * top <= min(experts, MAX_CHOICES)


def takes_shared(stacks: Sequence[Any], shared: Sequence[Any], tokens: int, top: int) -> bool:
    """Returns whether mat-vecs also multiply by one more expert, shared by few tokens.

    stacks: gate, up and down (experts, n, k); shared: matrices (n, k) of these formats and sizes.
    """
    alike = all(
        isinstance(w, QuantizedArray) and (w.format, w.shape) == (stack.format, stack.shape[1:])
        for w, stack in zip(shared, stacks, strict=True)
    )
    return alike and tokens <= MAX_ROWS and top < MAX_ROUTED


class Router(NamedTuple):
    """Routing inputs for a gate-and-up mat-vec that selects the experts itself.

    logits: (m, experts); bias: (experts,), None if absent; routing: a `Routing` of the kernels;
    shared_logits: (m, 1), logits of the weights of an expert that all tokens share; None if the
    weights are 1, or if there is no such expert.
    """

    logits: jax.Array
    bias: jax.Array | None
    routing: Any
    shared_logits: jax.Array | None


def products(
    launch: KernelCall,
    x: jax.Array,
    ids: jax.Array | Router,
    weights: Sequence[QuantizedArray],
    *,
    shared: Sequence[QuantizedArray] = (),
    norm_weight: jax.Array | None = None,
    eps: float = 0.0,
    biases: Sequence[jax.Array | None] = (),
    activation: str | None = None,
    activations: str | None = None,
    output: Literal["f32", "q8_1"] = "f32",
) -> list[jax.Array]:
    """[rms_norm](x) @ w[id].T for every selected expert, for one stack or a gate and an up stack.

    With a gate and an up stack, applies `activation`. A separate launch normalizes, or quantizes a
    very long row, if the mat-vec's prologue does not.

    Args:
      x: (m, k); ids: int32 (m, top), or a Router for two stacks.
      weights: stacks of shape (experts, n, k); biases: for two stacks, (experts, n) for each, or
        None if absent.
      shared: with a Router, gate and up (n, k) of an expert that each token has as its last one,
        after the `top` selected ones.

    Returns:
      [(m * top, n) float32], or with output q8_1 the arrays of `quantize_q8_1`. With a Router, ids
      (m, top) and weights (m, top) come first. `top` counts a shared expert, whose id is `experts`.
    """
    from ptx_kernels.kernels.matvec import expert_matvec_rule, gated_matvec, matvec
    from ptx_kernels.tuning import choose

    m, (experts, n, columns) = x.shape[0], weights[0].shape
    router = ids if isinstance(ids, Router) else None
    top = ids.routing.top if isinstance(ids, Router) else ids.shape[1]
    formats, exact = tuple(w.format for w in weights), activations == "f32"
    config = choose(
        expert_matvec_rule,
        formats,
        n,
        columns,
        m * (top + bool(shared)),
        norm=norm_weight is not None,
        output=output,
        exact=exact,
    )
    operands, norm = gemv.activation_operands(launch, config, x, norm_weight, eps)
    common: dict[str, Any] = {"n": n, "columns": columns, "m": m, "experts": experts, "top": top}
    common |= {"config": config, "output": output, **norm}
    if config.activations != "q8_1":
        common["dtype"] = ptx_name(operands[0].dtype)
    terms: list[jax.Array] = []
    if activation is None:
        kernel = matvec(format=formats[0], **common)
    else:
        if any(bias is not None for bias in biases):
            terms = [jnp.zeros((experts, n)) if bias is None else bias for bias in biases]
        if router is not None:
            gated = router.shared_logits is not None
            common |= {"routing": router.routing, "shared": bool(shared), "shared_gate": gated}
        kernel = gated_matvec(formats=formats, activation=activation, biases=bool(terms), **common)
    choice = [ids]
    if router is not None:
        choice = jax.tree.leaves((router.logits, router.bias, router.shared_logits))
    planes = jax.tree.leaves([*zip(weights, shared, strict=True)] if shared else list(weights))
    return launch(kernel, *choice, *planes, *operands, *terms)


def mixture(
    launch: KernelCall,
    h: Sequence[jax.Array],
    ids: jax.Array,
    weights: jax.Array,
    down: QuantizedArray,
    *,
    shared: QuantizedArray | None = None,
    bias: jax.Array | None,
    scale: jax.Array | None,
    residual: jax.Array | None,
    exact: bool,
) -> jax.Array:
    """Down projections of the selected experts, summed with the routing weights: float32 (m, n).

    A token's result is residual + sum over its experts of weight * (scale * (down[id] @ h) + bias).

    Args:
      h: (m * top, k) float32 if `exact`, else as q8_1.
      ids, weights: (m, top); down: (experts, n, k); bias: (experts, n); scale: (experts,);
        residual: (m, n).
      shared: (n, k), the matrix of each token's last expert, whose id is `experts`; None if absent.
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
        top=top - (shared is not None),
        shared=shared is not None,
        biases=bias is not None,
        scales=scale is not None,
        residual=residual is not None,
        config=choose(mixture_matvec_rule, down.format, n, columns, m, exact),
    )
    terms = [term for term in (bias, scale, residual) if term is not None]
    (y,) = launch(kernel, ids, weights, *jax.tree.leaves((down, shared)), *h, *terms)
    return y


def groups(weights: Sequence[Any], activations: str | None) -> bool:
    """Returns whether `grouped` multiplies q8_1 activations by all of these stacks."""
    from ptx_kernels.kernels.gemm import stackable

    return activations != "f32" and all(
        isinstance(w, QuantizedArray)
        and gemm_takes(w.format, w.shape[2])
        and stackable(w.format, *w.shape[1:])
        for w in weights
    )


def grouped(launch: KernelCall, x: jax.Array, ids: jax.Array, w: QuantizedArray) -> jax.Array:
    """x @ w[id].T for every selected expert, by tensor cores: float32 (m, top, n).

    Results are zeros where an id is out of range. Rows are quantized to q8_1 once and gathered in
    the order of the experts; each expert's rows are then tiles of one GEMM. XLA sorts, gathers, and
    restores the order of the results.

    Args:
      x: (m, k), or (m, top, k) with a row for each selected expert; ids: int32 (m, top).
      w: (experts, n, k).
    """
    from ptx_kernels.kernels.gemm import expert_gemm_rule, gemm
    from ptx_kernels.tuning import choose

    (m, top), (experts, n, columns) = ids.shape, w.shape
    config = choose(expert_gemm_rule, w.format, n, columns, m * top, experts)
    order, tiles = _tiles(ids.reshape(-1), experts, config.m_tile)
    rows = order // (top if x.ndim == 2 else 1)
    packed = quantize_q8_1.ptx(launch, x.reshape(-1, columns))
    kernel = gemm(format=w.format, n=n, columns=columns, m=m * top, experts=experts, config=config)
    (y,) = launch(kernel, tiles, *w.planes, *(part[rows] for part in packed))
    positions = jnp.zeros_like(order).at[order].set(jnp.arange(m * top, dtype=order.dtype))
    return y[positions].reshape(m, top, n)


def _tiles(ids: jax.Array, experts: int, m_tile: int) -> tuple[jax.Array, jax.Array]:
    """Sorts slots (pairs of a token and a selected expert) by expert, for an expert GEMM.

    Args:
      ids: (slots,) expert ids.

    Returns:
      int32 (slots,), the slots in the order of their experts, invalid ids last; and int32
      (tiles, 3), the expert of each tile of at most `m_tile` rows, its first row and its end.
    """
    from ptx_kernels.kernels.gemm import tile_count

    slots = ids.shape[0]
    named = jnp.where((ids >= 0) & (ids < experts), ids, experts)
    order = jnp.argsort(named, stable=True).astype(jnp.int32)
    counts = jnp.zeros(experts + 1, jnp.int32).at[named].add(1)
    ends, tiles = jnp.cumsum(counts), -(-counts // m_tile)
    last = jnp.cumsum(tiles)
    number = jnp.arange(tile_count(slots, experts, m_tile), dtype=jnp.int32)
    of = jnp.sum(last[None] <= number[:, None], axis=1, dtype=jnp.int32)
    exists, of = of <= experts, jnp.minimum(of, experts)
    first = (ends - counts)[of] + (number - (last - tiles)[of]) * m_tile
    end = jnp.minimum(first + m_tile, ends[of])
    parts = of, jnp.where(exists, first, 0), jnp.where(exists, end, 0)
    return order, jnp.stack(parts, axis=1).astype(jnp.int32)
