"""Describes the architecture of Qwen 3 VL (text decoder)."""

from __future__ import annotations

from .base import Architecture, CheckpointClass
from .qwen2vl import rope_sections
from .tensor_tables import ATTENTION, QK_NORMS

TEXT = CheckpointClass(
    "Qwen3VLForConditionalGeneration",
    required=("num_key_value_heads", "head_dim"),
    defaults={"rope_theta": 500000.0},
    biases={"attention_bias": ("qkv", "attention_output")},
    sections=True,
    free_sections=True,
    text_config=True,
)

ARCHITECTURE = Architecture(
    "qwen3vl",
    checkpoints=(TEXT,),
    attention=ATTENTION + QK_NORMS,
    metadata=rope_sections,
)
