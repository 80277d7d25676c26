"""Lazy decoder: builds the Flax modules at trace time, so that other uses need not import Flax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from jax_q4k import QuantizedArray

from ..config import Config, rope
from ..config.tensors import float_array
from .parts import Parts

if TYPE_CHECKING:
    from .decoder import Decoder


def lazy_decoder(
    config: Config,
    tensors: Mapping[str, QuantizedArray | jax.Array],
    tasks: Mapping[str, Mapping[str, jax.Array]] | None = None,
) -> Parts:
    """Returns the decoder of `tensors` as Parts; modules are built only when Parts are merged.

    tasks: adapters of an encoder's tasks, as in `build`.
    """
    held = {
        name: tensor if len(tensor.shape) > 1 else float_array(tensor)
        for name, tensor in tensors.items()
    }
    frequencies = rope.tables(config.ropes, held)
    state: dict[str, Any] = {"tensors": held}
    state["rope_frequencies"] = [jax.device_put(f) for f in frequencies]
    if tasks:
        state["tasks"] = tasks

    def merge(state: dict[str, Any]) -> Decoder:
        from .build import build

        return build(config, **state)

    return Parts(config, state, merge)
