"""Dataclasses of arrays as arguments and results of programs that `jax.export` serializes."""

from __future__ import annotations

from typing import TypeVar

import jax.export

T = TypeVar("T")


def exportable(kind: type[T]) -> type[T]:
    """Class decorator, above `jax.tree_util.register_dataclass`; every field is an array's."""
    return jax.export.register_pytree_node_serialization(
        kind,
        serialized_name=f"jax_q4k.models.{kind.__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: (),
    )
