"""Policies of `jax.checkpoint` that know this package's products."""

from __future__ import annotations

from typing import Any

from .ops import float_matmul, linear, mlp, packed_matmul

_PRODUCTS = frozenset(op.primitive for op in (packed_matmul.op, float_matmul.op, linear.op, mlp.op))


def products_saveable(primitive: Any, *_: Any, **__: Any) -> bool:
    """True of matrix products of this package: their results are kept, the rest is recomputed.

    As `jax.checkpoint_policies.dots_saveable` is for JAX's own; `save_from_both_policies` of it
    takes both: `jax.checkpoint(f, policy=jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_saveable, jq.checkpoint_policies.products_saveable))`.
    """
    return primitive in _PRODUCTS
