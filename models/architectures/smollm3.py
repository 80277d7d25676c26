"""Describes the architecture of SmolLM 3."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..support.json_fields import JSONFields
from .base import MAX_LAYERS, Architecture, CheckpointClass


def rotated_layers(fields: JSONFields) -> list[bool]:
    """Returns whether each layer uses rope."""
    layers = fields.integer("num_hidden_layers", least=1, most=MAX_LAYERS)
    key = "no_rope_layers"  # lists the layers that do use rope with 1, the others with 0
    if (listed := fields.array(key, None)) is None:
        interval = fields.integer("no_rope_layer_interval", 4, least=1, most=MAX_LAYERS)
        return [layer % interval < interval - 1 for layer in range(layers)]
    listed = listed[:layers]
    if len(listed) < layers or not all(value in (0, 1) for value in listed):
        fields.fail(key, f"must be 0 or 1 for each of {layers} layers, not {listed!r:.100}")
    return [bool(value) for value in listed]


def rotated(fields: JSONFields) -> dict[str, Any]:
    """Returns metadata with the layers that use rope."""
    return {"rope.rotated_layers": np.array(rotated_layers(fields))}


def windowed(fields: JSONFields, layer: int) -> bool:
    """Tells whether a layer is windowed if layer_types is missing: one without rope may be."""
    return fields.boolean("use_sliding_window", False) and not rotated_layers(fields)[layer]


ARCHITECTURE = Architecture(
    "smollm3",
    checkpoints=(
        CheckpointClass(
            "SmolLM3ForCausalLM",
            defaults={"rope_theta": 2000000.0},
            biases={"attention_bias": ("qkv", "attention_output"), "mlp_bias": ("mlp",)},
            window=True,
            windowed=windowed,
            computed=rotated,
            tied=True,
        ),
    ),
    interleaved_rope=True,
    rotated=lambda layer, windowed: layer % 4 < 3,
)
