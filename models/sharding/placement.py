"""Where a model's arrays lie on several devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


class Placement(NamedTuple):
    """Where a model's tensors and its cache lie.

    Attributes:
      axis: of the mesh, over which heads are split; None: every device has all of them.
      data: the mesh's axis over which a batch's rows and their pages are split; None: every device
        has all of them.
      tensors: by GGUF's names.
    """

    mesh: Mesh
    axis: str | None
    data: str | None
    tensors: dict[str, NamedSharding]

    @property
    def devices(self) -> int:
        """Devices along `axis`."""
        return int(self.mesh.shape[self.axis]) if self.axis else 1

    @property
    def groups(self) -> int:
        """Parts that a batch is split into, each with pages of its own."""
        return int(self.mesh.shape[self.data]) if self.data else 1

    @property
    def whole(self) -> NamedSharding:
        """All of an array on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def explicit(self) -> bool:
        """True if an axis of the mesh is part of arrays' types."""
        return AxisType.Explicit in self.mesh.axis_types

    @property
    def spans_processes(self) -> bool:
        """True if devices of other processes are among the mesh's."""
        return not self.whole.is_fully_addressable

    def rows(self, x: jax.Array) -> jax.Array:
        """Inside a program: x (batch, ...), its rows split over `data` if they divide evenly."""
        if self.data is None or x.shape[0] % self.groups:
            return x
        return self._moved(x, PartitionSpec(self.data))

    def all_rows(self, x: jax.Array) -> jax.Array:
        """Inside a program: a small x (batch, ...), whole on every device."""
        return x if self.data is None else self.everywhere(x)

    def everywhere(self, x: jax.Array) -> jax.Array:
        """Inside a program: x, whole on every device."""
        return self._moved(x, PartitionSpec())

    def _moved(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        moved = jax.sharding.reshard if self.explicit else jax.lax.with_sharding_constraint
        return moved(x, NamedSharding(self.mesh, spec))

    def put(self, arrays: Any) -> Any:
        """A tree of arrays, alike in every process, whole on every device."""
        if not self.spans_processes:
            return jax.device_put(arrays, self.whole)
        return jax.tree.map(self._put_own, arrays)

    def _put_own(self, array: Any) -> jax.Array:
        # `device_put` would compare all processes' values: a program and a sum for each array.
        given = np.asarray(array)
        return jax.make_array_from_callback(given.shape, self.whole, lambda index: given[index])

    def spread(self, arrays: list[Any]) -> list[Any]:
        """Arrays; those that lie on a single device, whole on every one of the mesh."""
        devices = set(self.mesh.devices.flat)

        def moved(array: Any) -> Any:
            if not isinstance(array, jax.Array) or array.sharding.device_set == devices:
                return array
            return self.put(array)

        return [moved(array) for array in arrays]
