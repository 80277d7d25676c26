"""Describes the architecture of Qwen 2 and 2.5."""

from __future__ import annotations

from .base import Architecture, CheckpointClass

ARCHITECTURE = Architecture(
    "qwen2",
    checkpoints=(CheckpointClass("Qwen2ForCausalLM", window="use_sliding_window"),),
    biases=("qkv",),
)
