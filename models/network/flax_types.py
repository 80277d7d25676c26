"""Integrates QuantizedArray with Flax: its Variable type, serialization and display."""

from __future__ import annotations

from typing import Any

import yaml
from flax import nnx, serialization

import jax_q4k as jq


class Packed(nnx.Variable[jq.QuantizedArray]):
    """Flax Variable of packed weights: bytes without gradients, which no optimizer updates.

    A separate Variable type, so that `nnx.Param` selects exactly the trainable weights.
    """


def variable(weight: Any) -> nnx.Variable[Any]:
    """Wraps a weight in Packed if it is packed, else in nnx.Param."""
    return Packed(weight) if jq.is_quantized(weight) else nnx.Param(weight)


def _state_dict(w: jq.QuantizedArray) -> dict[str, Any]:
    """Returns the planes by name, as Flax state dicts hold them."""
    names = [plane.name for plane in jq.formats.get(w.format).planes]
    return {name: serialization.to_state_dict(p) for name, p in zip(names, w.planes, strict=True)}


def _from_state_dict(w: jq.QuantizedArray, state: dict[str, Any]) -> jq.QuantizedArray:
    restored = jq.from_planes(state)
    if not jq.is_quantized(restored) or restored.format != w.format:
        found = restored.format if jq.is_quantized(restored) else f"no planes: {sorted(state)}"
        raise ValueError(f"the target is {w.format}; the state holds {found}")
    return restored


nnx.register_data_type(jq.QuantizedArray)
serialization.register_serialization_state(jq.QuantizedArray, _state_dict, _from_state_dict)
# `linen.tabulate` prints the tree of descriptions of its leaves with PyYAML.
yaml.SafeDumper.add_representer(
    jq.QuantizedArray, lambda dumper, w: dumper.represent_dict({w.format: _state_dict(w)})
)
