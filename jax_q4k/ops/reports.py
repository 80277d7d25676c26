"""Reports NaN in results and indices out of range to `jax.experimental.checkify`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..jax_internals import Report, on_checkify
from .backends import Operation

#: Result leaves -> those whose values are computed and not only moved.
Computed = Callable[[Sequence[Any]], Sequence[Any]]

#: (*operands, **params) -> indices (count,) and the shape of the array whose rows they select.
Indices = Callable[..., tuple[jax.Array, tuple[int, ...]]]


def define(op: Operation, computed: Computed, indices: Indices | None) -> None:
    """Registers checkify's rule for `op`: NaN in computed results, and indices out of range."""

    def rule(
        report: Report, *leaves: Any, tree: Any, implementation: Any, **params: Any
    ) -> Sequence[Any]:
        results = op.primitive.bind(*leaves, tree=tree, implementation=implementation, **params)
        report.nan(op.primitive, computed(results))
        if indices is not None:
            report.outside(op.primitive, *indices(*jax.tree.unflatten(tree, leaves), **params))
        return results

    on_checkify(op.primitive, rule)
