"""A decoder split into weights, a pytree, and a function that merges them back."""

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
      state: a pytree of its weights.
      merge: a state, whose arrays may be tracers -> the decoder's modules.
      static: what `merge` depends on besides the config and the state's structure, as an object
        whose repr tells it; None: nothing.
    """

    config: Config
    state: Any
    merge: Callable[[Any], Decoder]
    static: Any = None


def split(decoder: Decoder) -> Parts:
    """The parts of a decoder's modules."""
    from flax import nnx  # which has been imported, or there were no modules

    graph, state = nnx.split(decoder)
    return Parts(decoder.config, state, functools.partial(nnx.merge, graph), graph)


class HasDecoder(Protocol):
    """A model that holds a decoder, such as `runner.model.Model`."""

    @property
    def config(self) -> Config: ...
    @property
    def weights(self) -> list[jax.Array]: ...
    def decoder(self, weights: list[jax.Array] | None = None) -> Decoder: ...
