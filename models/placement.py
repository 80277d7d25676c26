"""Where a model's arrays lie on several devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


class Placement(NamedTuple):
    """Where a model's tensors and its cache lie.

    Attributes:
      axis: of the mesh, over which heads are split.
      tensors: by GGUF's names.
    """

    mesh: Mesh
    axis: str
    tensors: dict[str, NamedSharding]

    @property
    def devices(self) -> int:
        """Devices along `axis`."""
        return int(self.mesh.shape[self.axis])

    @property
    def whole(self) -> NamedSharding:
        """All of an array on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def explicit(self) -> bool:
        """True if an axis of the mesh is part of arrays' types."""
        return AxisType.Explicit in self.mesh.axis_types

    def spread(self, arrays: list[Any]) -> list[Any]:
        """Arrays; those that lie on a single device, whole on every one of the mesh."""
        devices = set(self.mesh.devices.flat)

        def moved(array: Any) -> Any:
            if not isinstance(array, jax.Array) or array.sharding.device_set == devices:
                return array
            return jax.device_put(array, self.whole)

        return [moved(array) for array in arrays]
