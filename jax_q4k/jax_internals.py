"""Wraps all private JAX APIs that this package uses, which JAX may rename in any release.

`tests/jax_q4k/test_jax_internals.py` reports a missing one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.extend
import jax.numpy as jnp
from jax._src import checkify, config, core, dispatch, dtypes, sharding_impls
from jax._src.lib import _jax, xla_client
from jax.experimental import topologies
from jax.interpreters import mlir

#: Raised when the operands' types have incompatible shardings.
ShardingTypeError: type[Exception] = core.ShardingTypeError


class Primitive(jax.extend.core.Primitive):
    """A primitive that casts its operands to vary over the same axes inside `jax.shard_map`.

    JAX inserts such casts in front of its own primitives. `varying_as` returns the results' types.
    """

    def bind(self, *args: Any, **params: Any) -> Any:
        return super().bind(*core.auto_insert_reshard(*args), **params)


def varying_as(
    operands: Sequence[Any], results: Sequence[jax.core.ShapedArray]
) -> list[jax.core.ShapedArray]:
    """Returns result types that vary over the same `jax.shard_map` axes as the operands."""
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
    """Runs a primitive outside any trace, as a compiled and cached program.

    Respects `jax.disable_jit` and `jax.debug_nans`, as JAX's own primitives do.
    """
    return dispatch.apply_primitive(primitive, *leaves, **params)


def refuse_as_value(kind: type, refuse: Callable[[Any], Any]) -> None:
    """Makes JAX call `refuse`, which raises, where an object of a type is used as one array.

    JAX's own message would be about `__jax_array__` and abstractification. Trees of arrays are not
    affected: their leaves are the values.
    """
    core.pytype_aval_mappings[kind] = refuse
    dtypes.canonicalize_value_handlers[kind] = refuse


class Report:
    """Errors that checkify has collected so far in the program it traces."""

    def __init__(self, context: Sequence[Any], error: checkify.Error, enabled: Any) -> None:
        self._context = context  # one argument in JAX 0.12
        self.error, self._enabled = error, enabled

    def nan(self, primitive: jax.extend.core.Primitive, results: Sequence[Any]) -> None:
        """Adds an error that occurs if one of `results` contains NaN."""
        if results:
            check_nans = cast("Any", checkify.check_nans)
            self.error = check_nans(primitive, *self._context, self.error, self._enabled, results)

    def outside(
        self, primitive: jax.extend.core.Primitive, indices: jax.Array, shape: tuple[int, ...]
    ) -> None:
        """Adds an error that occurs if one of `indices` (count,) is out of range.

        shape: shape of the array whose rows `indices` select.
        """
        if checkify.OOBError not in self._enabled:
            return
        wrong = (indices < 0) | (indices >= shape[0])
        first = checkify.oob_payload(wrong[:, None], indices[:, None], (0,), shape)
        found = checkify.OOBError(checkify.get_traceback(), primitive.name, shape, first)
        assert_func = cast("Any", checkify.assert_func)
        self.error = assert_func(*self._context, self.error, jnp.any(wrong), found)


def on_checkify(primitive: jax.extend.core.Primitive, rule: Callable[..., Sequence[Any]]) -> None:
    """Registers a primitive's checkify rule: `rule(report, *leaves, **params)` -> results."""

    def checked(*arguments: Any, **params: Any) -> Any:
        at = next(i for i, x in enumerate(arguments) if isinstance(x, checkify.Error))
        report = Report(arguments[:at], *arguments[at : at + 2])
        results = rule(report, *arguments[at + 2 :], **params)
        return report.error, results

    checkify.error_checks[primitive] = checked


def lower_with_devices(primitive: jax.extend.core.Primitive) -> None:
    """Makes JAX pass its devices to lowering rules, and lower a program for each set of them."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def lowering_devices(ctx: mlir.LoweringRuleContext) -> Sequence[jax.Device] | None:
    """Returns the devices that a program is lowered for; None if JAX does not say."""
    devices = getattr(ctx.module_context.axis_context, "device_assignment", None)
    return None if devices is None else tuple(devices)


def partitioned_devices(ctx: mlir.LoweringRuleContext) -> int:
    """Returns the number of devices over which XLA's partitioner splits the lowered operation.

    The number is 1 inside `jax.shard_map`, and on a mesh whose axes are all explicit: the types
    then say that the operands are replicated.
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
    """Returns the PartitionSpec of a sharding that XLA's partitioner has chosen.

    Returns None if the sharding splits an axis over part of a mesh axis, as Shardy may do with two
    heads on four devices.
    """
    tiled = sharding._to_xla_hlo_sharding(ndim)
    try:
        spec: jax.sharding.PartitionSpec = sharding_impls.parse_flatten_op_sharding(tiled, mesh)[0]
    except Exception:  # JAX does not document which
        return None
    return spec


def trace_context() -> tuple[Any, ...]:
    """Returns all JAX settings that tracing and compiling depend on, hashable.

    These are the global settings, the thread's settings, and user contexts such as
    `jax_q4k.implementation`. JAX's own cache keys contain them.
    """
    context: tuple[Any, ...] = config.trace_context()
    return context


def topology_fingerprint(device: jax.Device) -> int:
    """Returns a number that identifies what XLA compiles for, such as a CPU's instruction sets.

    The number is part of the keys of JAX's compilation cache.
    """
    return int(xla_client.get_topology_for_devices([device]).fingerprint()) % (1 << 64)


def compile_only_devices(target_config: str, count: int = 1) -> list[Any]:
    """Returns `count` GPUs that need not exist, as devices that XLA can compile for.

    target_config: the GPU's GpuTargetConfigProto in text form.

    Raises RuntimeError or ValueError if JAX's CUDA plugin is not installed.
    """
    shape = f"1x1x{count}"
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=shape, topology=shape, target_config=target_config
    )
    return list(topology.devices)


def serialized_program(compiled: jax.stages.Compiled) -> bytes:
    """Serializes an executable as XLA does: protocol buffers and machine code, no pickle."""
    executable: Any = compiled.runtime_executable()
    return bytes(executable.serialize())


class LoadedProgram:
    """A loaded executable of one device that maps flat lists of arrays to flat lists of arrays."""

    def __init__(self, executable: Any, device: jax.Device) -> None:
        self._executable, self.device = executable, device

    def __call__(self, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """Runs the program; the arguments must have the compiled device, shapes and dtypes."""
        outputs = self._executable.execute_sharded(list(arguments))
        return [arrays[0] for arrays in outputs.disassemble_into_single_device_arrays()]


def load_program(data: bytes, device: jax.Device) -> LoadedProgram:
    """Loads the bytes of `serialized_program`; raises JaxRuntimeError if XLA cannot."""
    devices = _jax.DeviceList((device,))
    return LoadedProgram(device.client.deserialize_executable(data, devices, None), device)
