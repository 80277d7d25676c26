"""Describes the architecture of Granite 3 and 4 (dense)."""

from __future__ import annotations

from .base import Architecture, CheckpointClass

TEXT = CheckpointClass(
    "GraniteForCausalLM",
    required=(),
    defaults={
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    biases={"attention_bias": ("qkv", "attention_output"), "mlp_bias": ("mlp",)},
    keys={
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "attention.scale": "attention_multiplier",
        "logit_scale": "logits_scaling",
    },
)

ARCHITECTURE = Architecture(
    "granite",
    checkpoints=(TEXT,),
    interleaved_rope=True,
    rope_freqs=True,
    optional_rope=True,
    scales=("embedding_scale", "residual_scale", "attention.scale"),
    logit_scale=lambda scale: 1 / scale,
)
