"""Splits a decoder into a pytree of weights and a function that merges them back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax

from ..config import Config

if TYPE_CHECKING:
    from .decoder import Decoder


class Parts(NamedTuple):
    """A decoder split into weights and a function that merges them back, like `nnx.split`.

    Attributes:
      state: a pytree of the weights.
      merge: maps a state, whose arrays may be tracers, to the decoder's modules.
      static: an object whose repr identifies everything that `merge` depends on besides config and
        tree structure of the state; None if nothing.
    """

    config: Config
    state: Any
    merge: Callable[[Any], Decoder]
    static: Any = None


def split(decoder: Decoder) -> Parts:
    """Splits a decoder into Parts."""
    from flax import nnx  # already imported, since a decoder exists

    graph, state = nnx.split(decoder)
    return Parts(decoder.config, state, functools.partial(nnx.merge, graph), graph)


class HasDecoder(Protocol):
    """Protocol of models that hold a decoder, such as `runner.model.Model`."""

    @property
    def config(self) -> Config: ...
    @property
    def weights(self) -> list[jax.Array]: ...
    def decoder(self, weights: list[jax.Array] | None = None) -> Decoder: ...
