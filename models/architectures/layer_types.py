"""Reads from config.json which layers of a checkpoint have sliding windows."""

from __future__ import annotations

from collections.abc import Callable

from ..support.json_fields import JSONFields
from .base import MAX_LAYERS

FULL, WINDOWED = "full_attention", "sliding_attention"


def read(
    fields: JSONFields, rule: Callable[[JSONFields, int], bool], other: str = WINDOWED
) -> list[bool]:
    """Returns whether the key layer_types gives each layer the type `other`, not full attention.

    rule: function of (config.json, layer) that answers this if layer_types is missing.

    Raises CheckpointError for unknown types, and for more or fewer types than layers.
    """
    layers = fields.integer("num_hidden_layers", least=1, most=MAX_LAYERS)
    types = fields.array("layer_types", None)
    if types is None:
        return [rule(fields, layer) for layer in range(layers)]
    check(fields, other)
    if len(types) != layers:
        fields.fail("layer_types", f"has {len(types)} entries, expected {layers}")
    return [kind == other for kind in types]


def check(fields: JSONFields, other: str = WINDOWED) -> None:
    """Raises CheckpointError if layer_types lists types besides full attention and `other`."""
    for kind in fields.array("layer_types", []):
        if kind not in (FULL, other):
            problem = f"{kind!r:.100} is not supported; supported: {FULL}, {other}"
            fields.fail("layer_types", problem)


def all_but_every(n: int, key: str | None = None) -> Callable[[JSONFields, int], bool]:
    """Returns a rule for `read`: all layers are windowed but the last of every n.

    key: key of config.json that may give another n.
    """

    def rule(fields: JSONFields, layer: int) -> bool:
        period = n if key is None else fields.integer(key, n, least=1, most=MAX_LAYERS)
        return layer % period < period - 1

    return rule


def after_full_layers(fields: JSONFields, layer: int) -> bool:
    """Tells whether a layer comes after the first max_window_layers; a rule for `read`."""
    return layer >= fields.integer("max_window_layers", least=0)
