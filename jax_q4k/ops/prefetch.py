"""Prefetches the next operation's weights into the L2 cache (sm_90).

Memory is idle between two launches: while the next kernel starts, and while its thread blocks wait
for their first bytes. Each launch ends with a prefetch of what the next one reads. No result
depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from ..arrays.indexed import IndexedArray, Packed, layers
from ..selection import current_selection
from . import checks
from .backends import KernelCall

if TYPE_CHECKING:
    from ptx_kernels.ptx import Kernel, Prefetch

#: Up to this many rows a product is memory bound, and prefetching helps; more are bound by L1.
MOST_ROWS = 8


def prefetched(weights: Sequence[Any]) -> tuple[Packed, ...]:
    """Returns the packed ones among `weights`, or () if `implementation` disables prefetching."""
    if not current_selection().prefetch:
        return ()
    values = map(checks.value, weights)
    return tuple(w for w in values if isinstance(w, Packed) and all(w.shape))


def with_prefetch(weights: Sequence[Packed]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the weights' leaves to append to a primitive's operands, and {"prefetch": tree}.

    Returns [] and {} without weights.
    """
    if not weights:
        return [], {}
    leaves, tree = jax.tree.flatten(tuple(weights))
    return leaves, {"prefetch": tree}


def without_prefetch(
    leaves: Sequence[Any], tree: Any, params: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Drops the weights to prefetch from a primitive's leaves and parameters.

    Returns the leaves of the operands, and the parameters without `prefetch`. All rules except
    lowering use only these.

    tree: tree structure of the operands.
    """
    return leaves[: tree.num_leaves], {k: v for k, v in params.items() if k != "prefetch"}


def asking(launch: KernelCall, weights: Sequence[Packed], m: int) -> KernelCall:
    """Wraps `launch` so that kernels of matmuls and attention also prefetch `weights` into L2.

    Each launch prefetches the next part of the weights.

    m: rows of activations of the matmuls that read the weights.
    """
    from ptx_kernels.kernels import FAMILIES, prefetch_rule
    from ptx_kernels.tuning import choose

    limit = choose(prefetch_rule) if weights and m <= MOST_ROWS else 0
    if not limit:
        return launch
    total, asked = sum(map(_nbytes, weights)), 0

    def call(kernel: Kernel, *operands: jax.Array) -> list[jax.Array]:
        nonlocal asked
        family = FAMILIES[kernel.family]
        if asked == total or not (family.weights or family.name == "paged_attention"):
            return launch(kernel, *operands)
        first, asked = asked, min(total, asked + limit)
        wanted = tuple(_part(w, first / total, asked / total) for w in weights)
        kernel = family.build(**kernel.arguments, prefetch=wanted)
        return launch(kernel, *operands, *jax.tree.leaves(list(weights)))

    return call


def _planes(w: Packed) -> tuple[tuple[int, ...], ...]:
    """Returns the shape (n, blocks, bytes) of each of a matrix's planes."""
    if isinstance(w, IndexedArray):
        return tuple(plane.shape[1:] for plane in w.stack.planes)
    return tuple(plane.shape for plane in w.planes)


def _nbytes(w: Packed) -> int:
    return sum(map(math.prod, _planes(w)))


def _part(w: Packed, first: float, last: float) -> Prefetch:
    """Returns the Prefetch of a matrix's rows from fraction `first` to fraction `last`, 0 to 1."""
    from ptx_kernels.ptx import Prefetch

    rows = w.shape[0]
    return Prefetch(
        planes=tuple((blocks, size) for _, blocks, size in _planes(w)),
        rows=rows,
        first=round(first * rows),
        last=round(last * rows),
        layers=layers(w),
    )
