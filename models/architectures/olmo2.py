"""Describes the architecture of OLMo 2 and 3."""

from __future__ import annotations

import dataclasses

from .base import Architecture, CheckpointClass
from .tensor_tables import ATTENTION, POST_NORMS, WIDE_QK_NORMS

TEXT = CheckpointClass(
    "Olmo2ForCausalLM",
    required=(),
    biases={"attention_bias": ("qkv", "attention_output")},
)

ARCHITECTURE = Architecture(
    "olmo2",
    checkpoints=(
        TEXT,
        dataclasses.replace(
            TEXT,
            name="Olmo3ForCausalLM",
            defaults={"sliding_window": 4096, "rope_theta": 500000.0},
            window=True,
            rope_by_type=True,
        ),
    ),
    attention=ATTENTION + WIDE_QK_NORMS,
    norms=POST_NORMS,
    windowed=lambda layer: layer % 4 < 3,  # applies to OLMo 3, whose files have a window
    local_rope_theta="global",
)
