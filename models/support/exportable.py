"""Lets `jax.export` serialize programs that take or return dataclasses of arrays."""

from __future__ import annotations

from typing import TypeVar

import jax.export

T = TypeVar("T")


def exportable(kind: type[T]) -> type[T]:
    """Class decorator that registers a dataclass for serialization by `jax.export`.

    All fields hold arrays. Write it above `jax.tree_util.register_dataclass`.
    """
    return jax.export.register_pytree_node_serialization(
        kind,
        serialized_name=f"jax_q4k.models.{kind.__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: (),
    )
