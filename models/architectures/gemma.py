"""Describes the architecture of Gemma 1."""

from __future__ import annotations

from .base import Architecture, CheckpointClass

ARCHITECTURE = Architecture(
    "gemma",
    checkpoints=(
        CheckpointClass(
            "GemmaForCausalLM",
            required=("num_key_value_heads", "head_dim"),
            biases={"attention_bias": ("qkv", "attention_output")},
            activations=("gelu",),  # in early files, although training used the approximation
            tied=True,
        ),
    ),
    activation="gelu",
    embedding_scale=lambda config: config.hidden_size**0.5,
    norm_offset=1.0,
)
