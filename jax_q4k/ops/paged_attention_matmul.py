"""Paged attention and the matrix product that follows it in a decoder: the output projection."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ptx_kernels import tuning
from ptx_kernels.kernels.quantize_q8_1 import GROUP

from ..arrays import QuantizedArray
from ..implementation import check_selection, current_selection
from . import attend, checks, fused_matmul, matmul
from .op import KernelCall, Op
from .paged_attention import checked_pages


def paged_attention_matmul(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_tables: Any,
    context_lens: Any,
    w: Any,
    *,
    bias: Any = None,
    residual: Any = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    activations: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """residual + paged_attention(q, ...) @ dequantize(w).T + bias, heads side by side, in float32.

    Where the product takes int8 activations that a kernel of its own would make, attention leaves
    them.

    Args:
      q, k_pages, v_pages, block_tables, context_lens, scale, window, soft_cap, sinks, k_scales,
      v_scales: as
        `paged_attention` takes them.
      w: QuantizedArray (n, num_heads * head_dim), or a float array.
      bias: (n,) or None. residual: (batch, n) or None.
      activations, implementation: as `matmul` takes them.

    Returns:
      (batch, n) float32.

    Raises:
      TypeError, ValueError: as `paged_attention` and `matmul`. NotImplementedError: a derivative is
        asked for.
    """
    chosen = (
        check_selection(implementation, activations).activations or current_selection().activations
    )
    given, params = checked_pages(
        q,
        k_pages,
        v_pages,
        block_tables,
        context_lens,
        sinks,
        k_scales,
        v_scales,
        scale,
        window,
        soft_cap,
    )
    w = checks.weight("w", w)
    batch, num_heads, head_dim = given.q.shape
    n, k = w.shape
    if k != num_heads * head_dim:
        raise ValueError(
            f"w has shape {w.shape}; its k must be num_heads * head_dim, {num_heads} * {head_dim}"
        )
    if not (
        batch
        and n
        and isinstance(w, QuantizedArray)
        and current_selection().fuses("paged_attention_matmul")
    ):
        out = attend.attend(given, params, implementation).reshape(batch, k)
        options: dict[str, Any] = {"activations": chosen, "implementation": implementation}
        return matmul.matmul(out, w, bias=bias, residual=residual, **options)
    operands = Operands(
        given,
        w,
        None if bias is None else checks.float32("bias", bias, (n,), "(n,)"),
        None
        if residual is None
        else checks.float32("residual", residual, (batch, n), "(batch, n)"),
    )
    leaves, tree = jax.tree.flatten(operands)
    (y,) = _op.bind(*leaves, tree=tree, **params, activations=chosen, implementation=implementation)
    return y


class Operands(NamedTuple):
    """What the primitive takes, as a pytree."""

    attention: attend.Operands
    w: Any  # packed (n, num_heads * head_dim)
    bias: jax.Array | None  # float32 (n,)
    residual: jax.Array | None  # float32 (batch, n)

    def product(self, out: jax.Array) -> fused_matmul.Operands:
        """What is left to do with attention's result."""
        return fused_matmul.Operands(
            out.reshape(out.shape[0], -1), self.residual, None, (self.w,), (self.bias,)
        )


def _reference(
    *leaves: jax.Array, tree: Any, activations: str | None, **params: Any
) -> list[jax.Array]:
    """The operation in plain JAX."""
    operands: Operands = jax.tree.unflatten(tree, leaves)
    (out,) = attend.reference(*operands.attention.given(), **params)
    return fused_matmul.chain(
        operands.product(out), 0.0, *fused_matmul.reference_steps(activations)
    )


def _kernels(
    launch: KernelCall, *leaves: jax.Array, tree: Any, activations: str | None, **params: Any
) -> list[jax.Array]:
    """The operation by PTX kernels; `activations` None: whichever is fastest."""
    operands: Operands = jax.tree.unflatten(tree, leaves)
    given, w, bias, residual = operands
    m, _, head_dim = given.q.shape
    n, columns = w.shape
    if activations != "f32" and head_dim % GROUP == 0 and fused_matmul.joinable((w,), m):
        config = tuning.fused_matvec((w.format,), (n,), columns, m, floats=True)
        if config.activations == "q8_1":  # else the mat-vec quantizes for itself
            quantized = attend.kernels(launch, *given.given(), **params, output="q8_1")
            return fused_matmul.one_matvec(launch, w, quantized, bias, residual, config)
    (out,) = attend.kernels(launch, *given.given(), **params)
    return fused_matmul.by_kernels(launch, operands.product(out), 0.0, activations)


def _native(
    *leaves: jax.Array, tree: Any, activations: str | None, **params: Any
) -> list[jax.Array]:
    """The operation by the CPU's kernels; `activations` None means q8_1."""
    operands: Operands = jax.tree.unflatten(tree, leaves)
    (out,) = attend.native(*operands.attention.given(), **params)
    return fused_matmul.by_native(operands.product(out), 0.0, activations)


def _abstract_eval(*leaves: Any, tree: Any, **_: Any) -> list[jax.core.ShapedArray]:
    operands: Operands = jax.tree.unflatten(tree, leaves)
    return [jax.core.ShapedArray((operands.attention.q.shape[0], operands.w.shape[0]), jnp.float32)]


_op = Op(
    "paged_attention_matmul",
    abstract_eval=_abstract_eval,
    reference=_reference,
    kernels=_kernels,
    native=_native,
)
