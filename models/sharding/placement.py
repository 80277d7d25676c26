"""Defines Placement: how one model's arrays are sharded over a mesh of devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


class Placement(NamedTuple):
    """Sharding of a model's tensors and KV cache.

    Attributes:
      axis: mesh axis over which heads are split; None means that heads are replicated.
      data: mesh axis over which batch rows and their KV pages are split; None means replicated.
      tensors: GGUF tensor name -> sharding.
    """

    mesh: Mesh
    axis: str | None
    data: str | None
    tensors: dict[str, NamedSharding]

    @property
    def devices(self) -> int:
        """Number of devices along `axis`."""
        return int(self.mesh.shape[self.axis]) if self.axis else 1

    @property
    def groups(self) -> int:
        """Number of shards of the batch, each with its own KV pages."""
        return int(self.mesh.shape[self.data]) if self.data else 1

    @property
    def replicated(self) -> NamedSharding:
        """Fully replicated sharding."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def explicit(self) -> bool:
        """Whether a mesh axis has type Explicit, so that shardings are part of array types."""
        return AxisType.Explicit in self.mesh.axis_types

    @property
    def spans_processes(self) -> bool:
        """Whether the mesh has devices of other processes."""
        return not self.replicated.is_fully_addressable

    def shard_rows(self, x: jax.Array) -> jax.Array:
        """Shards the rows of x (batch, ...) over `data` if they divide evenly, inside jit."""
        if self.data is None or x.shape[0] % self.groups:
            return x
        return self._moved(x, PartitionSpec(self.data))

    def replicate_rows(self, x: jax.Array) -> jax.Array:
        """Replicates a small x (batch, ...) whose rows may be sharded, inside jit."""
        return x if self.data is None else self.replicate(x)

    def replicate(self, x: jax.Array) -> jax.Array:
        """Replicates x, inside jit."""
        return self._moved(x, PartitionSpec())

    def _moved(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        moved = jax.sharding.reshard if self.explicit else jax.lax.with_sharding_constraint
        return moved(x, NamedSharding(self.mesh, spec))

    def put(self, arrays: Any) -> Any:
        """Replicates a tree of NumPy arrays over the mesh; they must be equal in every process."""
        if not self.spans_processes:
            return jax.device_put(arrays, self.replicated)
        return jax.tree.map(self._put_local, arrays)

    def _put_local(self, array: Any) -> jax.Array:
        # `device_put` would compare the values of all processes: one program and sum per array.
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, self.replicated, lambda index: host[index])

    def spread(self, arrays: list[Any]) -> list[Any]:
        """Returns the arrays, replicating those that are not yet on the mesh's devices."""
        devices = set(self.mesh.devices.flat)

        def moved(array: Any) -> Any:
            if not isinstance(array, jax.Array) or array.sharding.device_set == devices:
                return array
            return self.put(array)

        return [moved(array) for array in arrays]
