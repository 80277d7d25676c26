"""Describes the architecture of StarCoder 2."""

from __future__ import annotations

from .base import Architecture, CheckpointClass
from .tensor_tables import PLAIN_MLP

ARCHITECTURE = Architecture(
    "starcoder2",
    checkpoints=(
        CheckpointClass(
            "Starcoder2ForCausalLM",
            defaults={"norm_epsilon": 1e-5},
            renamed={"rms_norm_eps": "norm_epsilon"},
            window=True,
            zero_biases={"use_bias": ("qkv", "attention_output", "mlp")},
            tied=True,
        ),
    ),
    mlp=PLAIN_MLP,
    biases=("qkv", "attention_output", "mlp", "norm"),
    layer_norm=True,
    activation="gelu",
)
