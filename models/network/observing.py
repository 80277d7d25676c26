"""Reports the inputs of a decoder's matrices while a program is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from ..config import Config
from ..config.tensors import table
from .adapters import owner_of, present

if TYPE_CHECKING:
    from .decoder import Decoder


def matrices(config: Config) -> dict[str, tuple[int | None, str]]:
    """Returns GGUF name -> (layer, module path) of every matrix or stack of matrices.

    Includes matrices that are never quantized, such as routers.
    """
    return {
        prefix + tensor.name: (layer, tensor.module)
        for tensor, prefix, _, layer in table(config)
        if len(tensor.shape.split()) > 1 and not tensor.is_norm and not tensor.table
    }


def present_matrices(decoder: Decoder) -> set[str]:
    """Returns the GGUF names of the matrices that a decoder has."""
    return present(decoder, matrices(decoder.config))


def observed(decoder: Decoder, names: Collection[str], report: Callable[..., None]) -> Decoder:
    """Replaces the matrices in `names` by ones that report their inputs; returns the decoder.

    report: called at each use of a matrix with its name, its activations (..., k), and for a stack
    of matrices the ids (..., top) of those that are used.
    """
    from .layers.observed import Observed  # imports Flax, which only programs need

    places = matrices(decoder.config)
    for name in names:
        owner, attribute = owner_of(decoder, *places[name])
        setattr(
            owner, attribute, Observed(getattr(owner, attribute), functools.partial(report, name))
        )
    return decoder
