"""Shards operations over devices: which axes may be split, and over which mesh axes.

An operation names the axes of its operands and results (`Layout`). `plan` derives from the operands
where each name is split. On a mesh of explicit axes, which are part of array types, `over_devices`
then runs the operation on each device's shards inside `jax.shard_map`. On a mesh of automatic axes,
XLA's partitioner requests the same plan (`partition.py`).
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

#: Mesh axes that an array's axis is split over, major to minor.
Axes = tuple[str, ...]

#: Suffix of the names of `jax.jit` calls that run an operation on each device's shards.
OVER_DEVICES = "_over_devices"

#: Name of an axis that is never split.
WHOLE = "_"


class Layout(NamedTuple):
    """Axis names of an operation's operands and results; axes of one name are split alike.

    Attributes:
      operands, results: strings of names such as "m k", as a tree prefix of the operands and of the
        results. An axis named `_` is never split, nor is an axis beyond the names, such as a
        plane's bytes.
      combined: names of axes whose shards give only partial results, which the operation's `split`
        combines. Axes of other names are split only if the results have them.
    """

    operands: Any
    results: Any
    combined: str = ""


@dataclasses.dataclass(frozen=True)
class Parts:
    """Mesh axes that a Layout's axes are split over, and collectives over these mesh axes.

    Used inside `jax.shard_map`. `axes`: name of a Layout's axis -> mesh axes that it is split over.
    """

    axes: Mapping[str, Axes]

    def split(self, name: str) -> bool:
        """Returns whether axes of this name are split."""
        return bool(self.axes.get(name))

    def alike(self, *names: str) -> bool:
        """Returns whether axes of these names are split over the same mesh axes, or not at all."""
        return len({self.axes.get(name, ()) for name in names}) == 1

    def sum(self, x: Any, name: str) -> Any:
        """Returns the sum (psum) of x over the shards of axis `name`; x if it is not split."""
        return jax.lax.psum(x, self.axes[name]) if self.split(name) else x

    def index(self, name: str) -> jax.Array:
        """Returns the index of this device's shard along axis `name`."""
        return jax.lax.axis_index(self.axes[name])

    def count(self, name: str) -> int:
        """Returns the number of shards along axis `name`."""
        return jax.lax.axis_size(self.axes[name])

    def gather(self, x: jax.Array, name: str) -> jax.Array:
        """All-gathers a small array over the shards of axis `name`: returns (count, ...)."""
        is_own = jnp.arange(self.count(name)) == self.index(name)
        is_own = is_own.reshape(-1, *[1] * x.ndim)
        return self.sum(jnp.where(is_own, x[None], jnp.zeros((), x.dtype)), name)

    def along(self, x: jax.Array, have: str, want: str) -> jax.Array:
        """Reshards the columns of x (m, k): split like axis `have` before, like `want` after."""
        if self.split(have):
            x = jnp.moveaxis(self.gather(x, have), 0, 1).reshape(x.shape[0], -1)
        if not self.split(want):
            return x
        size = x.shape[1] // self.count(want)
        return jax.lax.dynamic_slice_in_dim(x, self.index(want) * size, size, axis=1)


class Plan(NamedTuple):
    """Sharding of an operation's operands and results; hashable.

    Attributes:
      axes: (name, mesh axes) of each name that is split.
      operands, results: PartitionSpec of each leaf.
    """

    axes: tuple[tuple[str, Axes], ...]
    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]


def leaf_names(names: Any, tree: Any) -> list[tuple[str, ...]]:
    """Returns the axis names of each leaf of `tree`; `names` is a tree prefix."""
    if isinstance(names, str):
        return [tuple(names.split())] * len(jax.tree.leaves(tree))
    return [
        found for name, part in zip(names, tree, strict=True) for found in leaf_names(name, part)
    ]


def axes_of(entry: Any) -> Axes:
    """Returns the mesh axes in one entry of a PartitionSpec, as a tuple."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


class Leaf(NamedTuple):
    """An operand or result: axis names, shape, bytes, and entries of its PartitionSpec."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    nbytes: int
    spec: Sequence[Any]

    def dims(self) -> Iterator[tuple[str, int, Axes]]:
        """Yields (name, size, mesh axes) of each named axis."""
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
    """Plans the sharding of an operation, given how its operands are sharded.

    Where possible, splits each axis name like the largest operand that has it. Operands with
    another sharding are resharded: usually activations, which are smaller than weights and pages.

    Args:
      sizes: sizes of the mesh axes.
      strict: raises ShardingTypeError if two axes of a result would be split over the same mesh
        axis; otherwise one of the operands is gathered.
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
    """Returns a Leaf for each array of `tree`, with its axis names and its PartitionSpec.

    names: strings of axis names, as a tree prefix of `tree`.
    """
    arrays = jax.tree.leaves(tree)
    return [
        Leaf(found, array.shape, math.prod(array.shape) * jnp.dtype(array.dtype).itemsize, spec)
        for found, array, spec in zip(leaf_names(names, tree), arrays, specs, strict=True)
    ]


def explicit_mesh(operation: str, leaves: Sequence[Any]) -> AbstractMesh | None:
    """Returns the leaves' mesh if one is split over an explicit mesh axis, else None.

    Raises:
      ValueError: leaves are on different meshes.
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
    """Returns the plan for operands that are split over explicit axes of `mesh`."""
    specs = [jax.typeof(leaf).sharding.spec for leaf in jax.tree.leaves(operands)]
    nowhere = [()] * len(jax.tree.leaves(results))
    args = leaves_of(layout.operands, operands, specs)
    made = leaves_of(layout.results, results, nowhere)
    return plan(operation, args, made, layout.combined, dict(mesh.shape), strict=True)


def explicit_axes(mesh: AbstractMesh) -> frozenset[str]:
    """Returns the explicit axes of a mesh, which are part of array types."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind == AxisType.Explicit)


def over_devices(
    operation: str, function: Callable[..., Any], mesh: AbstractMesh, plan: Plan
) -> Callable[..., Any]:
    """Returns a compiled function that runs `function` on each device's shards (shard_map).

    Both functions map leaves to a list of leaves. Leaves with another sharding than the plan's are
    resharded first.
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
    """Reshapes arrays (..., *rest) to (rows, *rest) and back, for operations that work row by row.

    On an explicit mesh, shards of the leading axes stay in place. The rows are then in the order of
    the devices, which makes no difference to such an operation.
    """

    shape: tuple[int, ...]
    mesh: AbstractMesh | None
    spec: tuple[Any, ...]

    @classmethod
    def of(cls, x: Any, dims: int = 1) -> Rows:
        """Returns the Rows for the leading axes of `x`, all but the last `dims`."""
        count = x.ndim - dims
        sharding = jax.typeof(x).sharding
        spec = tuple(sharding.spec)[:count]
        mesh = sharding.mesh if any(axes_of(entry) for entry in spec) else None
        return cls(x.shape[:count], mesh, spec)

    def merge(self, x: Any) -> jax.Array:
        """Reshapes (..., *rest) to (rows, *rest)."""
        trailing = x.shape[len(self.shape) :]
        if self.mesh is None:
            return x.reshape(math.prod(self.shape), *trailing)
        rest = tuple(jax.typeof(x).sharding.spec)[len(self.shape) :]
        rest = tuple(None if {*axes_of(e)} & {*self._all()} else e for e in rest)
        x = _placed(x, self.mesh, PartitionSpec(*self.spec, *rest))
        return self._reshape((*self.spec, *rest), (self._all(), *rest), len(self.shape), ())(x)

    def split(self, y: Any) -> jax.Array:
        """Reshapes (rows, *rest) to (..., *rest)."""
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
    """Returns a compiled function that reshapes each shard's first `axes` axes to `leading`."""

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
