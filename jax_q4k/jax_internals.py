"""Names of JAX that are not public, all of them here: JAX may rename them in any release.

`tests/jax_q4k/test_jax_internals.py` says which one is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.extend
import jax.numpy as jnp
from jax._src import checkify, config, core, dispatch, sharding_impls
from jax._src.lib import _jax, xla_client
from jax.experimental import topologies
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


class Report:
    """The errors that checkify has found so far in a program that it traces."""

    def __init__(self, context: Sequence[Any], error: checkify.Error, enabled: Any) -> None:
        self._context = context  # JAX 0.12 has one
        self.error, self._enabled = error, enabled

    def nan(self, primitive: jax.extend.core.Primitive, results: Sequence[Any]) -> None:
        """Adds NaN in one of the results."""
        if results:
            check_nans = cast("Any", checkify.check_nans)
            self.error = check_nans(primitive, *self._context, self.error, self._enabled, results)

    def outside(
        self, primitive: jax.extend.core.Primitive, indices: jax.Array, shape: tuple[int, ...]
    ) -> None:
        """Adds one of `indices` (count,) that is no row of an array of that shape."""
        if checkify.OOBError not in self._enabled:
            return
        wrong = (indices < 0) | (indices >= shape[0])
        first = checkify.oob_payload(wrong[:, None], indices[:, None], (0,), shape)
        found = checkify.OOBError(checkify.get_traceback(), primitive.name, shape, first)
        assert_func = cast("Any", checkify.assert_func)
        self.error = assert_func(*self._context, self.error, jnp.any(wrong), found)


def on_checkify(primitive: jax.extend.core.Primitive, rule: Callable[..., Sequence[Any]]) -> None:
    """Has checkify run `rule(report, *leaves, **params)`, which gives the primitive's results."""

    def checked(*arguments: Any, **params: Any) -> Any:
        at = next(i for i, x in enumerate(arguments) if isinstance(x, checkify.Error))
        report = Report(arguments[:at], *arguments[at : at + 2])
        results = rule(report, *arguments[at + 2 :], **params)
        return report.error, results

    checkify.error_checks[primitive] = checked


def lower_with_devices(primitive: jax.extend.core.Primitive) -> None:
    """Has JAX tell lowering how many devices the program is for; `partitioned_devices` says it."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def partitioned_devices(ctx: mlir.LoweringRuleContext) -> int:
    """Devices among which XLA's partitioner splits what is lowered.

    It is 1 inside `jax.shard_map`, and where types say that operands lie whole on every device: on
    a mesh all of whose axes are explicit.
    """
    context = ctx.module_context.axis_context
    if not isinstance(context, sharding_impls.ShardingContext):
        return 1
    explicit = jax.sharding.AxisType.Explicit
    for aval in ctx.avals_in:
        kinds = aval.sharding.mesh.axis_types  # type: ignore[attr-defined]
        if kinds and all(kind == explicit for kind in kinds):
            return 1
    return int(context.num_devices)


def spec_of(sharding: Any, mesh: jax.sharding.Mesh, ndim: int) -> jax.sharding.PartitionSpec | None:
    """The PartitionSpec of a sharding that XLA's partitioner gives.

    None where the sharding splits an axis over a part of a mesh axis: Shardy may do so where four
    devices meet two heads.
    """
    tiled = sharding._to_xla_hlo_sharding(ndim)
    try:
        spec: jax.sharding.PartitionSpec = sharding_impls.parse_flatten_op_sharding(tiled, mesh)[0]
    except Exception:  # one of several that JAX does not document
        return None
    return spec


def trace_context() -> tuple[Any, ...]:
    """All of JAX's settings that tracing and compiling depend on, hashable: JAX's own keys have it.

    They are the global ones, those of the thread, and user contexts such as
    `jax_q4k.implementation`.
    """
    context: tuple[Any, ...] = config.trace_context()
    return context


def topology_fingerprint(device: jax.Device) -> int:
    """A number that tells apart what XLA compiles for: a CPU's instruction sets, for instance.

    JAX keys its compilation cache by it.
    """
    return int(xla_client.get_topology_for_devices([device]).fingerprint()) % (1 << 64)


def compile_only_devices(target_config: str, count: int = 1) -> list[Any]:
    """GPUs of one host that XLA knows by their description alone, a GpuTargetConfigProto as text.

    Raises RuntimeError or ValueError where JAX's CUDA plugin is not installed.
    """
    shape = f"1x1x{count}"
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=shape, topology=shape, target_config=target_config
    )
    return list(topology.devices)


def serialized_program(compiled: jax.stages.Compiled) -> bytes:
    """The executable as XLA serializes it: protocol buffers and machine code, no pickle."""
    executable: Any = compiled.runtime_executable()
    return bytes(executable.serialize())


class LoadedProgram:
    """An executable of one device, as its machine code alone: flat arrays in, flat arrays out."""

    def __init__(self, executable: Any, device: jax.Device) -> None:
        self._executable, self.device = executable, device

    def __call__(self, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """Results for arrays on the device, of the shapes and dtypes that it was compiled for."""
        outputs = self._executable.execute_sharded(list(arguments))
        return [arrays[0] for arrays in outputs.disassemble_into_single_device_arrays()]


def load_program(data: bytes, device: jax.Device) -> LoadedProgram:
    """What `serialized_program` gave, loaded; JaxRuntimeError where XLA cannot."""
    devices = _jax.DeviceList((device,))
    return LoadedProgram(device.client.deserialize_executable(data, devices, None), device)
