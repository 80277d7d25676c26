"""Adds LoRA adapters to the matrices of a decoder: one for all rows, or another one for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp

from ..config import Config
from ..config.tensors import table

if TYPE_CHECKING:
    from .decoder import Decoder

#: GGUF name of a matrix -> arguments of its AdaptedLinear: a, b and scale.
Arrays: TypeAlias = Mapping[str, Mapping[str, jax.Array]]


def named_linears(config: Config) -> dict[str, tuple[int | None, str]]:
    """Returns GGUF name -> (layer, module path) of every matrix that may have an adapter."""
    return {
        prefix + tensor.name: (layer, tensor.module)
        for tensor, prefix, _, layer in table(config)
        if tensor.is_matrix and not tensor.of_experts
    }


def present(decoder: Decoder, names: Mapping[str, tuple[int | None, str]]) -> set[str]:
    """Returns which of the matrices in `names`, as `named_linears` returns them, a decoder has."""
    found = set()
    for name, place in names.items():
        owner, attribute = owner_of(decoder, *place)
        if getattr(owner, attribute, None) is not None:
            found.add(name)
    return found


def adapted(decoder: Decoder, arrays: Arrays) -> Decoder:
    """Replaces the matrices in `arrays` by AdaptedLinears; returns the decoder."""
    from .layers import AdaptedLinear  # imports Flax, which only programs need

    places = named_linears(decoder.config)
    for name, of_matrix in arrays.items():
        owner, attribute = owner_of(decoder, *places[name])
        setattr(owner, attribute, AdaptedLinear(getattr(owner, attribute), **of_matrix))
    return decoder


def adapted_by_row(decoder: Decoder, stacks: Arrays, rows: jax.Array, count: int) -> Decoder:
    """Like `adapted`, with `count` adapters, of which each row uses one or none.

    stacks: a (count * rank, k), b (n, count * rank) and scale (count * rank,) of each matrix.
    rows: int32 (rows,), number of the row's adapter from 1, or 0.
    """
    chosen: dict[int, jax.Array] = {}  # by rank

    def factors(scale: jax.Array) -> jax.Array:
        rank = len(scale) // count
        if rank not in chosen:
            numbers = 1 + jnp.arange(len(scale), dtype=jnp.int32) // rank
            chosen[rank] = rows[:, None] == numbers[None]
        return jnp.where(chosen[rank], scale[None], 0.0)

    arrays = {name: {**one, "scale": factors(one["scale"])} for name, one in stacks.items()}
    return adapted(decoder, arrays)


def owner_of(decoder: Decoder, layer: int | None, path: str) -> tuple[Any, str]:
    """Returns the module that has a matrix, and the name of its attribute."""
    owner: Any = decoder if layer is None else decoder.layers[layer]
    *owners, attribute = path.split(".")
    for step in owners:
        owner = getattr(owner, step)
    return owner, attribute
