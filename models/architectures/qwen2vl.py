"""Describes the architecture of Qwen 2 VL and 2.5 VL (text decoder)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from .base import Architecture, CheckpointClass
from .layer_types import after_full_layers

if TYPE_CHECKING:
    from ..config import Config


def rope_sections(config: Config) -> dict[str, Any]:
    """Returns the numbers of pairs rotated by time, height and width; equal for text tokens."""
    eighth = config.rope_dim // 8
    space = (config.rope_dim // 2 - eighth) // 2
    time = config.rope_dim // 2 - 2 * space
    return {"rope.dimension_sections": np.array([time, space, space, 0], np.int32)}


TEXT = CheckpointClass(
    "Qwen2VLForConditionalGeneration",
    defaults={
        "rope_theta": 1e6,
        "mrope_section": [16, 24, 24],
        "sliding_window": 4096,
        "max_window_layers": 80,
    },
    window="use_sliding_window",
    windowed=after_full_layers,
    sections=True,
    tied_by_text=True,
    text_config=True,
    flat=True,
)

ARCHITECTURE = Architecture(
    "qwen2vl",
    checkpoints=(
        TEXT,
        dataclasses.replace(TEXT, name="Qwen2_5_VLForConditionalGeneration"),
    ),
    biases=("qkv",),
    metadata=rope_sections,
)
