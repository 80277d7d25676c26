"""Describes the architecture of Qwen 3 VL with experts (text decoder)."""

from __future__ import annotations

import dataclasses

from . import qwen3moe, qwen3vl
from .base import Stored
from .qwen2vl import rope_sections

TEXT = dataclasses.replace(
    qwen3vl.TEXT,
    name="Qwen3VLMoeForConditionalGeneration",
    stored=(
        Stored(
            "mlp.experts.gate_up_proj", ("ffn_gate_exps", "ffn_up_exps"), transposed=None, bare=True
        ),
        Stored("mlp.experts.down_proj", ("ffn_down_exps",), transposed=None, bare=True),
    ),
    required=("num_key_value_heads",),
    keys=qwen3moe.EXPERT_KEYS,
    implied=qwen3moe.SPARSE,
)

ARCHITECTURE = dataclasses.replace(
    qwen3moe.ARCHITECTURE, name="qwen3vlmoe", checkpoints=(TEXT,), metadata=rope_sections
)
