"""Describes the architecture of SmolLM 3."""

from __future__ import annotations

from .base import Architecture, CheckpointClass

ARCHITECTURE = Architecture(
    "smollm3",
    checkpoints=(
        CheckpointClass(
            "SmolLM3ForCausalLM",
            defaults={"rope_theta": 2000000.0},
            biases={"attention_bias": ("qkv", "attention_output"), "mlp_bias": ("mlp",)},
            implied={
                "no_rope_layers": lambda config: [
                    int(layer % 4 < 3) for layer in range(config.num_layers)
                ],
                "no_rope_layer_interval": lambda _: 4,
                "use_sliding_window": lambda _: False,
            },
            tied=True,
        ),
    ),
    interleaved_rope=True,
    rotated=lambda layer, windowed: layer % 4 < 3,
)
