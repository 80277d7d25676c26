"""Operations on arrays that lie on several devices: which axes may be split, over which devices.

An operation names the axes of its operands and results (`Layout`). `plan` reads off the operands
where each name is split. On a mesh of explicit axes, which are part of arrays' types,
`over_devices` then runs the operation on each device's parts inside `jax.shard_map`; on a mesh of
automatic axes XLA's partitioner asks for the same plan (`partition.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ..jax_internals import ShardingTypeError

#: Mesh axes that an array's axis is split over, the slowest first.
Axes = tuple[str, ...]

#: Ends the names of `jax.jit`'s calls that run an operation on each device's parts.
OVER_DEVICES = "_over_devices"

#: The name of an axis that lies whole on every device.
WHOLE = "_"


class Layout(NamedTuple):
    """Names of an operation's axes, such as "m k": equal names are split alike.

    Attributes:
      operands, results: strings of names, as a tree prefix of the operands and of the results. An
        axis named `_` lies whole on every device, and so do those beyond the names: a plane's
        bytes.
      combined: names of which a device's part does not give its part of the results: the
        operation's `split` puts them together. Other names are split only where results have them.
    """

    operands: Any
    results: Any
    combined: str = ""


@dataclasses.dataclass(frozen=True)
class Parts:
    """The mesh axes that each name of a Layout is split over, inside `jax.shard_map`."""

    axes: Mapping[str, Axes]

    def split(self, name: str) -> bool:
        """True if devices hold parts of the axes of that name."""
        return bool(self.axes.get(name))

    def alike(self, *names: str) -> bool:
        """True if the axes of these names are split over the same devices, or not at all."""
        return len({self.axes.get(name, ()) for name in names}) == 1

    def sum(self, x: Any, name: str) -> Any:
        """The sum over the devices that hold its parts."""
        return jax.lax.psum(x, self.axes[name]) if self.split(name) else x

    def index(self, name: str) -> jax.Array:
        """Which of the parts this device holds."""
        return jax.lax.axis_index(self.axes[name])

    def count(self, name: str) -> int:
        """The number of parts."""
        return jax.lax.axis_size(self.axes[name])

    def gather(self, x: jax.Array, name: str) -> jax.Array:
        """Small arrays of all parts, (count, ...), alike on all devices."""
        own = jnp.arange(self.count(name)) == self.index(name)
        own = own.reshape(-1, *[1] * x.ndim)
        return self.sum(jnp.where(own, x[None], jnp.zeros((), x.dtype)), name)

    def along(self, x: jax.Array, have: str, want: str) -> jax.Array:
        """x (m, k), whose columns are split as the axes named `have`, as those named `want`."""
        if self.split(have):
            x = jnp.moveaxis(self.gather(x, have), 0, 1).reshape(x.shape[0], -1)
        if not self.split(want):
            return x
        size = x.shape[1] // self.count(want)
        return jax.lax.dynamic_slice_in_dim(x, self.index(want) * size, size, axis=1)


class Plan(NamedTuple):
    """Where an operation's operands and results lie; hashable.

    Attributes:
      axes: (name, mesh axes) of the names that are split.
      operands, results: PartitionSpec of each leaf.
    """

    axes: tuple[tuple[str, Axes], ...]
    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]


def leaf_names(names: Any, tree: Any) -> list[tuple[str, ...]]:
    """Names of the axes of each leaf of `tree`, of which `names` is a prefix."""
    if isinstance(names, str):
        return [tuple(names.split())] * len(jax.tree.leaves(tree))
    return [
        found for name, part in zip(names, tree, strict=True) for found in leaf_names(name, part)
    ]


def axes_of(entry: Any) -> Axes:
    """An entry of a PartitionSpec as a tuple."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


class Leaf(NamedTuple):
    """An operand or result: names of its axes, shape, and the entries of its PartitionSpec."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    nbytes: int
    spec: Sequence[Any]

    def dims(self) -> Iterator[tuple[str, int, Axes]]:
        """(name, size, mesh axes) of each axis that has a name."""
        padded = (*self.spec, *[None] * (len(self.shape) - len(self.spec)))
        for name, size, entry in zip(self.names, self.shape, padded, strict=False):
            yield name, size, axes_of(entry)


def plan(
    operation: str,
    operands: Sequence[Leaf],
    results: Sequence[Leaf],
    combined: str,
    sizes: Mapping[str, int],
    strict: bool,
) -> Plan:
    """Where each name is split: as the largest operand that has it says, if it can be.

    What lies otherwise is moved: activations, as a rule, which are smaller than weights and pages.

    Args:
      sizes: of the mesh's axes.
      strict: raises ShardingTypeError where a result's axes would be split over the same mesh axis;
        else one of the operands is gathered.
    """
    leaves = [*operands, *results]
    passed = {name for leaf in results for name in leaf.names}
    possible = (passed | set(combined.split())) - {WHOLE}
    axes: dict[str, Axes] = {}
    wanted = sorted(operands, key=lambda leaf: -leaf.nbytes)
    for leaf in [*wanted, *([] if strict else results)]:
        for name, _, over in leaf.dims():
            if not over or name not in possible or name in axes:
                continue
            parts = math.prod(sizes[axis] for axis in over)
            if any(n == name and size % parts for each in leaves for n, size, _ in each.dims()):
                continue
            taken = {n: axis for n, all_ in axes.items() for axis in all_ if axis in over}
            clashing = [
                each for each in leaves if name in each.names and taken.keys() & {*each.names}
            ]
            if not clashing:
                axes[name] = over
            elif strict and name in passed and any(each in results for each in clashing):
                other, axis = next((n, a) for n, a in taken.items() if n in clashing[0].names)
                raise ShardingTypeError(
                    f"{operation}: mesh axis {axis!r} splits two axes of the result, {other!r} and "
                    f"{name!r} of {' '.join(clashing[0].names)!r}: reshard an operand by "
                    "jax.sharding.reshard"
                )
    return Plan(
        tuple(sorted(axes.items())),
        tuple(_spec(leaf, axes) for leaf in operands),
        tuple(_spec(leaf, axes) for leaf in results),
    )


def _spec(leaf: Leaf, axes: Mapping[str, Axes]) -> PartitionSpec:
    split = [axes.get(name, ()) for name, _ in zip(leaf.names, leaf.shape, strict=False)]
    entries = [over if len(over) > 1 else over[0] if over else None for over in split]
    return PartitionSpec(*entries, *[None] * (len(leaf.shape) - len(entries)))


def leaves_of(names: Any, tree: Any, specs: Sequence[Any]) -> list[Leaf]:
    """Leaves of operands or results with arrays' shapes and dtypes."""
    arrays = jax.tree.leaves(tree)
    return [
        Leaf(found, array.shape, math.prod(array.shape) * jnp.dtype(array.dtype).itemsize, spec)
        for found, array, spec in zip(leaf_names(names, tree), arrays, specs, strict=True)
    ]


def explicit_mesh(operation: str, leaves: Sequence[Any]) -> AbstractMesh | None:
    """The mesh where some leaf's axis is split over an explicit mesh axis.

    Raises:
      ValueError: leaves lie on different meshes.
    """
    mesh: AbstractMesh | None = None
    for leaf in leaves:
        sharding = jax.typeof(leaf).sharding
        if any(axes_of(entry) for entry in sharding.spec):
            if mesh is not None and sharding.mesh != mesh:
                raise ValueError(
                    f"{operation}: operands lie on different meshes, {mesh} and {sharding.mesh}"
                )
            mesh = sharding.mesh
    return mesh


def explicit_plan(
    operation: str, mesh: AbstractMesh, layout: Layout, operands: Any, results: Any
) -> Plan:
    """The plan of operands that are split over explicit axes of a mesh, `explicit_mesh`'s."""
    specs = [jax.typeof(leaf).sharding.spec for leaf in jax.tree.leaves(operands)]
    nowhere = [()] * len(jax.tree.leaves(results))
    given = leaves_of(layout.operands, operands, specs)
    made = leaves_of(layout.results, results, nowhere)
    return plan(operation, given, made, layout.combined, dict(mesh.shape), strict=True)


def explicit_axes(mesh: AbstractMesh) -> frozenset[str]:
    """The mesh's axes that are part of types."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Explicit)


def over_devices(
    operation: str, function: Callable[..., Any], mesh: AbstractMesh, plan: Plan
) -> Callable[..., Any]:
    """Compiled: `function` of leaves to a list of leaves, on each device's parts of them.

    Leaves that lie otherwise than the plan has it are moved first.
    """
    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=plan.operands,
        out_specs=list(plan.results),
        axis_names=explicit_axes(mesh),
    )

    def run(*leaves: Any) -> Any:
        return mapped(
            *(_placed(leaf, mesh, spec) for leaf, spec in zip(leaves, plan.operands, strict=True))
        )

    run.__name__ = operation + OVER_DEVICES
    return jax.jit(run)


def _placed(leaf: Any, mesh: AbstractMesh, spec: PartitionSpec) -> Any:
    return jax.sharding.reshard(leaf, NamedSharding(mesh, spec))


class Rows(NamedTuple):
    """Arrays (..., *kept) as (rows, *kept), and back: what an operation does row by row.

    On an explicit mesh the parts of split leading axes stay where they are: the rows then come in
    the devices' order, which such an operation does not see.
    """

    shape: tuple[int, ...]
    mesh: AbstractMesh | None
    spec: tuple[Any, ...]

    @classmethod
    def of(cls, x: Any, kept: int = 1) -> Rows:
        """The leading axes of `x`, all but the last `kept`."""
        count = x.ndim - kept
        sharding = jax.typeof(x).sharding
        spec = tuple(sharding.spec)[:count]
        mesh = sharding.mesh if any(axes_of(entry) for entry in spec) else None
        return cls(x.shape[:count], mesh, spec)

    def merge(self, x: Any) -> jax.Array:
        """(..., *kept) -> (rows, *kept)."""
        kept = x.shape[len(self.shape) :]
        if self.mesh is None:
            return x.reshape(math.prod(self.shape), *kept)
        rest = tuple(jax.typeof(x).sharding.spec)[len(self.shape) :]
        rest = tuple(None if {*axes_of(e)} & {*self._all()} else e for e in rest)
        x = _placed(x, self.mesh, PartitionSpec(*self.spec, *rest))
        return self._reshape((*self.spec, *rest), (self._all(), *rest), len(self.shape), ())(x)

    def split(self, y: Any) -> jax.Array:
        """(rows, *kept) -> (..., *kept)."""
        if self.mesh is None:
            return y.reshape(*self.shape, *y.shape[1:])
        rest = tuple(jax.typeof(y).sharding.spec)[1:]
        y = _placed(y, self.mesh, PartitionSpec(self._all(), *rest))
        sizes = self.mesh.shape
        local = tuple(
            n // math.prod(sizes[axis] for axis in axes_of(entry))
            for n, entry in zip(self.shape, self.spec, strict=True)
        )
        return self._reshape((self._all(), *rest), (*self.spec, *rest), 1, local)(y)

    def _all(self) -> Axes:
        return tuple(axis for entry in self.spec for axis in axes_of(entry))

    def _reshape(
        self, before: tuple[Any, ...], after: tuple[Any, ...], axes: int, leading: tuple[int, ...]
    ) -> Callable[..., Any]:
        return _reshape(self.mesh, before, after, axes, leading)


@functools.lru_cache(maxsize=256)
def _reshape(
    mesh: Any, before: tuple[Any, ...], after: tuple[Any, ...], axes: int, leading: tuple[int, ...]
) -> Callable[..., Any]:
    """Compiled: each device's part with its first `axes` axes as `leading`, or as a single one."""

    def reshaped(part: jax.Array) -> jax.Array:
        first = leading or (math.prod(part.shape[:axes]),)
        return part.reshape(*first, *part.shape[axes:])

    return jax.jit(
        jax.shard_map(
            reshaped,
            mesh=mesh,
            in_specs=PartitionSpec(*before),
            out_specs=PartitionSpec(*after),
            axis_names=explicit_axes(mesh),
        )
    )
