"""Policies for `jax.checkpoint` that recognize this package's matmuls."""

from __future__ import annotations

from typing import Any

from .ops import float_matmul, linear_op, mlp, packed_matmul

_PRODUCTS = frozenset(
    op.primitive for op in (packed_matmul.op, float_matmul.op, linear_op.op, mlp.op)
)


def products_saveable(primitive: Any, *_: Any, **__: Any) -> bool:
    """Policy that saves the results of this package's matmuls and recomputes everything else.

    Corresponds to `jax.checkpoint_policies.dots_saveable`, which recognizes JAX's own matmuls.
    To save both kinds: `jax.checkpoint(f, policy=jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_saveable, jq.checkpoint_policies.products_saveable))`.
    """
    return primitive in _PRODUCTS
