"""Registers QuantizedArray with Flax: as data of NNX modules, for serialization and for display."""

from __future__ import annotations

import sys
from typing import Any

from ptx_kernels import formats

from .plane_names import format_of

_registered = False


def if_imported(array: type) -> None:
    """Registers the type `array`, QuantizedArray, if the program has imported Flax.

    Each new QuantizedArray calls this, so that a program need not import anything for it.
    """
    if not _registered and "flax" in sys.modules:
        _register(array)


def _register(array: type) -> None:
    global _registered
    _registered = True
    import yaml
    from flax import nnx, serialization

    nnx.register_data_type(array)
    serialization.register_serialization_state(array, _state_dict, _from_state_dict)
    # `linen.tabulate` prints the tree of descriptions of its leaves with PyYAML.
    yaml.SafeDumper.add_representer(
        array, lambda dumper, w: dumper.represent_dict({w.format: _state_dict(w)})
    )


def _state_dict(w: Any) -> dict[str, Any]:
    """Returns the planes by name, as Flax state dicts hold them."""
    from flax import serialization

    names = [plane.name for plane in formats.get(w.format).planes]
    return {name: serialization.to_state_dict(p) for name, p in zip(names, w.planes, strict=True)}


def _from_state_dict(w: Any, state: dict[str, Any]) -> Any:
    found = format_of(state)
    if found is None or found != w.format:
        held = found or f"no planes: {sorted(state)}"
        raise ValueError(f"the target is {w.format}; the state holds {held}")
    block = formats.get(found)
    planes = [state[plane.name] for plane in block.planes]
    *leading, blocks, _ = planes[0].shape
    return type(w)(found, (*leading, blocks * block.block_size), planes)
