"""Describes the architecture of Qwen 2 and 2.5."""

from __future__ import annotations

from .base import Architecture, CheckpointClass
from .layer_types import after_full_layers

ARCHITECTURE = Architecture(
    "qwen2",
    checkpoints=(
        CheckpointClass(
            "Qwen2ForCausalLM",
            defaults={"sliding_window": 4096, "max_window_layers": 28},
            window="use_sliding_window",
            windowed=after_full_layers,
        ),
    ),
    biases=("qkv",),
)
