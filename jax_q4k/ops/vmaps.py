"""Batching rules (`vmap`) of operations: one call with more rows, a loop, or `vmap` in plain JAX.

A rule takes the operation, the leaves of its operands, the mapped axis of each leaf (None if it is
not mapped), and the primitive's parameters. It returns the result leaves and their mapped axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import is_quantized
from ..arrays.indexed import IndexedArray, Packed
from .backends import Operation, of_leaves

Params = dict[str, Any]
Axes = Sequence[int | None]
Mapped = tuple[list[Any], list[int]]
Rule = Callable[[Operation, Sequence[Any], Axes, Params], Mapped]


def by_examples(op: Operation, leaves: Sequence[Any], axes: Axes, params: Params) -> Mapped:
    """Runs the operation on one example at a time, in a loop."""
    mapped = [
        jnp.moveaxis(a, axis, 0) for a, axis in zip(leaves, axes, strict=True) if axis is not None
    ]

    def example(parts: list[Any]) -> Any:
        left = iter(parts)
        operands = (a if axis is None else next(left) for a, axis in zip(leaves, axes, strict=True))
        return op.primitive.bind(*operands, **params)

    out = jax.lax.map(example, mapped)
    return out, [0] * len(out)


def by_layers(op: Operation, leaves: Sequence[Any], axes: Axes, params: Params) -> Mapped:
    """Like `by_examples`, but packed matrices stay in their stack and are read in place.

    The operation must take an IndexedArray for a matrix, for all of its matrices or for none.
    """
    operands = jax.tree.unflatten(params["tree"], leaves)
    parts, tree = jax.tree.flatten(operands, is_leaf=lambda a: isinstance(a, Packed))
    at = iter(axes)
    over = [[next(at) for _ in jax.tree.leaves(part)] for part in parts]
    for i, (part, mapped) in enumerate(zip(parts, over, strict=True)):
        if isinstance(part, IndexedArray) or (is_quantized(part) and None in mapped):
            return by_examples(op, leaves, axes, params)
        if is_quantized(part):
            planes = [
                jnp.moveaxis(a, axis or 0, 0) for a, axis in zip(part.planes, mapped, strict=True)
            ]
            stack = jax.tree.unflatten(jax.tree.structure(part), planes)
            parts[i] = IndexedArray(stack, jnp.arange(len(planes[0]), dtype=jnp.int32))
            over[i] = [None] * len(planes) + [0]
    leaves, tree = jax.tree.flatten(jax.tree.unflatten(tree, parts))
    return by_examples(op, leaves, [a for axes in over for a in axes], params | {"tree": tree})


def by_reference(op: Operation, leaves: Sequence[Any], axes: Axes, params: Params) -> Mapped:
    """Applies `jax.vmap` to the operation's reference."""
    plain = {k: v for k, v in params.items() if k not in ("tree", "implementation")}
    function = of_leaves(op.reference, params["tree"], plain)
    out = jax.vmap(function, in_axes=tuple(axes))(*leaves)
    return out, [0] * len(out)


def by_rows(
    op: Operation,
    leaves: Sequence[Any],
    axes: Axes,
    params: Params,
    *,
    operands: int = 1,
    otherwise: Rule = by_layers,
) -> Mapped:
    """Runs a single call on the rows of all examples, (batch * rows, k).

    The first `operands` operands and all results have an axis of rows. `otherwise` is the rule if
    another operand is mapped, or if there is no example.
    """
    count = sum(child.num_leaves for child in params["tree"].children()[:operands])
    (batch,) = {a.shape[axis] for a, axis in zip(leaves, axes, strict=True) if axis is not None}
    if not batch or any(axis is not None for axis in axes[count:]):  # no kernel takes zero rows
        return otherwise(op, leaves, axes, params)
    with_rows = [
        jnp.broadcast_to(a, (batch, *a.shape)) if axis is None else jnp.moveaxis(a, axis, 0)
        for a, axis in zip(leaves[:count], axes[:count], strict=True)
    ]
    m = with_rows[0].shape[1]
    flat = (a.reshape(batch * m, *a.shape[2:]) for a in with_rows)
    out = op.primitive.bind(*flat, *leaves[count:], **params)
    return [y.reshape(batch, m, *y.shape[1:]) for y in out], [0] * len(out)
