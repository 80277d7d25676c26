"""Describes the architecture of Qwen 3 (dense)."""

from __future__ import annotations

import dataclasses

from .base import Architecture, CheckpointClass
from .encoder_tables import HEAD, labels
from .layer_types import after_full_layers
from .tensor_tables import ATTENTION, OUTPUT, QK_NORMS

_QWEN3 = CheckpointClass(
    "Qwen3ForCausalLM",
    required=("num_key_value_heads", "head_dim"),  # transformers defaults head_dim to 128
    defaults={"sliding_window": 4096, "max_window_layers": 28},
    biases={"attention_bias": ("qkv", "attention_output")},
    window="use_sliding_window",
    windowed=after_full_layers,
    reranker="qwen3-reranker",
)

ARCHITECTURE = Architecture(
    "qwen3",
    checkpoints=(
        _QWEN3,
        dataclasses.replace(
            _QWEN3, name="Qwen3ForSequenceClassification", reranker="", computed=labels
        ),
    ),
    output=OUTPUT + HEAD[2:],  # of rerankers
    attention=ATTENTION + QK_NORMS,
)
