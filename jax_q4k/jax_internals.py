"""Names of JAX that are not public, all of them here: JAX may rename them in any release.

`tests/jax_q4k/test_jax_internals.py` says which one is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
from jax._src import core, dispatch, sharding_impls
from jax.interpreters import mlir

#: Raised where the types of operands say that they lie on devices in ways that do not go together.
ShardingTypeError: type[Exception] = core.ShardingTypeError


class Primitive(jax.extend.core.Primitive):
    """A primitive whose operands agree, inside `jax.shard_map`, on the axes that they vary over.

    JAX's own operations insert such casts in front of their primitives; types of results follow
    by `varying_as`.
    """

    def bind(self, *args: Any, **params: Any) -> Any:
        return super().bind(*core.auto_insert_reshard(*args), **params)


def varying_as(
    operands: Sequence[Any], results: Sequence[jax.core.ShapedArray]
) -> list[jax.core.ShapedArray]:
    """Types of results that differ between the devices of a `jax.shard_map` as the operands do."""
    varying = frozenset[str]().union(*(aval.manual_axis_type.varying for aval in operands))
    if not varying:
        return list(results)
    mesh = next(a.sharding.mesh for a in operands if a.manual_axis_type.varying)
    return [
        aval.update(
            sharding=jax.sharding.NamedSharding(
                mesh, jax.sharding.PartitionSpec(*[None] * len(aval.shape))
            ),
            manual_axis_type=core.ManualAxisType(varying=varying),
        )
        for aval in results
    ]


def run_eagerly(primitive: jax.extend.core.Primitive, *leaves: Any, **params: Any) -> Any:
    """The primitive's results outside any trace: compiled as a program of its own, and kept.

    It respects `jax.disable_jit` and `jax.debug_nans`, as JAX's own primitives do.
    """
    return dispatch.apply_primitive(primitive, *leaves, **params)


def lower_with_devices(primitive: jax.extend.core.Primitive) -> None:
    """Has JAX tell lowering how many devices the program is for; `partitioned_devices` says it."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def partitioned_devices(ctx: mlir.LoweringRuleContext) -> int:
    """Devices among which XLA's partitioner splits what is lowered; 1 inside `jax.shard_map`."""
    context = ctx.module_context.axis_context
    if isinstance(context, sharding_impls.ShardingContext):
        return int(context.num_devices)
    return 1


def spec_of(sharding: Any, mesh: jax.sharding.Mesh, ndim: int) -> jax.sharding.PartitionSpec:
    """The PartitionSpec of a sharding that XLA's partitioner gives.

    It is empty, whole on every device, where the sharding splits an axis over a part of a mesh
    axis: Shardy may do so where four devices meet two heads.
    """
    tiled = sharding._to_xla_hlo_sharding(ndim)
    try:
        return sharding_impls.parse_flatten_op_sharding(tiled, mesh)[0]
    except Exception:  # one of several that JAX does not document
        return jax.sharding.PartitionSpec()
