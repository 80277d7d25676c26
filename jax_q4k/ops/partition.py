"""Partitions operations on meshes with automatic axes, in a callback from XLA's partitioner."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding

from ..jax_internals import spec_of
from ..sharding import gathers
from ..sharding.layout import WHOLE, Layout, Parts, Plan, leaf_names, leaves_of, plan

#: Function from (parts, *leaves) to the result leaves.
OnParts = Callable[..., list[Any]]


def partitioned(
    operation: str, function: OnParts, layout: Layout, operands: Any, results: Any
) -> Callable[..., list[Any]]:
    """Wraps `function` in `custom_partitioning`, so that XLA splits it as `layout` allows.

    Returns a function of leaves. The leaves after the operands' are weights to prefetch and are
    dropped.

    operands, results: trees with the arrays' shapes and dtypes.
    """
    record = gathers.record()  # here, because the partitioner runs in a thread of its own
    called = custom_partitioning(lambda *leaves: function(Parts({}), *leaves))

    def partition(mesh: Any, arg_shapes: Sequence[Any], result_shapes: Sequence[Any]) -> Any:
        specs = [
            [spec_of(leaf.sharding, mesh, len(leaf.shape)) for leaf in leaves]
            for leaves in (arg_shapes, result_shapes)
        ]
        found = plan(
            operation,
            leaves_of(layout.operands, operands, [spec or () for spec in specs[0]]),
            leaves_of(layout.results, results, [spec or () for spec in specs[1]]),
            layout.combined,
            dict(mesh.shape),
            strict=False,
        )
        record.extend(gathers.gathers(operation, arg_shapes, specs[0], found.operands))
        return mesh, _on_parts(function, found), *_shardings(mesh, found)

    rule, options = sharding_rule(layout, operands, results)
    called.def_partition(partition=partition, sharding_rule=rule, decode_shardings=False, **options)
    count = len(jax.tree.leaves(operands))
    return lambda *leaves: called(*leaves[:count])


def _on_parts(function: OnParts, found: Plan) -> Callable[..., list[Any]]:
    parts = Parts(dict(found.axes))
    return lambda *leaves: function(parts, *leaves)


def _shardings(mesh: Any, found: Plan) -> tuple[list[Any], tuple[Any, ...]]:
    results = [NamedSharding(mesh, spec) for spec in found.results]
    return results, tuple(NamedSharding(mesh, spec) for spec in found.operands)


def sharding_rule(layout: Layout, operands: Any, results: Any) -> tuple[str, dict[str, Any]]:
    """Returns Shardy's sharding rule for a layout, and the kinds and sizes of its factors.

    Axes of one name may differ in size: k values of x and k / 256 blocks of w. The factor that may
    be split is their greatest common divisor; the rest of each is a separate factor that is not.
    """
    named = [
        list(zip(leaf_names(names, tree), [a.shape for a in jax.tree.leaves(tree)], strict=True))
        for names, tree in ((layout.operands, operands), (layout.results, results))
    ]
    shared: dict[str, int] = {}
    for names, shape in (leaf for side in named for leaf in side):
        for name, size in zip(names, shape, strict=False):
            shared[name] = math.gcd(shared.get(name, 0), size)
    passed = {name for names, _ in named[1] for name in names}
    combined = set(layout.combined.split())
    possible = {n for n in passed | combined if n != WHOLE and shared.get(n, 1) > 1}
    reduced: dict[str, None] = {}  # factors that results lack, by first appearance, as in Shardy
    unsplit: list[str] = []  # factors that are not split
    sizes: dict[str, int] = {}  # sizes of factors of axes that have several
    complete: set[str] = set()  # factors that are a complete axis somewhere

    def entry(name: str, size: int) -> str:
        if name in (possible & combined) - passed:
            reduced[name] = None
        if name in possible and size == shared[name]:
            complete.add(name)
            return name
        rest = f"whole{len(unsplit)}"
        unsplit.append(rest)
        if name not in possible:
            return rest
        sizes.update({name: shared[name], rest: size // shared[name]})
        return f"({name} {rest})"

    def side(leaves: list[Any]) -> str:
        return ", ".join(
            " ".join(map(entry, (*names, *[WHOLE] * (len(shape) - len(names))), shape))
            for names, shape in leaves
        )

    rule = f"{side(named[0])} -> {side(named[1])}"
    return rule, {
        "reduction_factors": tuple(reduced),
        "need_replication_factors": tuple(unsplit),
        **{name: size for name, size in sizes.items() if name not in complete},
    }
