"""Lets `jax.export` serialize programs that take or return dataclasses of arrays."""

from __future__ import annotations

import json
from typing import TypeVar

import jax.export

T = TypeVar("T")


def exportable(kind: type[T]) -> type[T]:
    """Class decorator that registers a dataclass for serialization by `jax.export`.

    Fields hold arrays, or are static and JSON. Write it above `jax.tree_util.register_dataclass`.
    """
    return jax.export.register_pytree_node_serialization(
        kind,
        serialized_name=f"jax_q4k.models.{kind.__name__}",
        serialize_auxdata=lambda static: json.dumps(static).encode(),
        deserialize_auxdata=lambda text: tuple(json.loads(text)),
    )
