"""Qwen 3, dense."""

from __future__ import annotations

from ..architecture import Architecture, CheckpointClass

ARCHITECTURE = Architecture(
    "qwen3",
    checkpoints=(
        CheckpointClass(
            "Qwen3ForCausalLM",
            required=("num_key_value_heads", "head_dim"),  # whose default is 128
            biases=("attention_bias",),
            window="use_sliding_window",
        ),
    ),
    qk_norm=True,
)
