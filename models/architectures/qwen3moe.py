"""Describes the architecture of Qwen 3 with experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .base import Architecture, CheckpointClass
from .tensor_tables import ATTENTION, EXPERTS, QK_NORMS

#: GGUF key -> key of Qwen's config.json.
EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}

#: Every layer has experts.
SPARSE: dict[str, Callable[[Any], Any]] = {
    "mlp_only_layers": lambda _: [],
    "decoder_sparse_step": lambda _: 1,
}

TEXT = CheckpointClass(
    "Qwen3MoeForCausalLM",
    defaults={"norm_topk_prob": False, "sliding_window": 4096},
    biases={"attention_bias": ("qkv", "attention_output")},
    window="use_sliding_window",
    keys={**EXPERT_KEYS, "expert_weights_norm": "norm_topk_prob"},
    implied=SPARSE,
)

ARCHITECTURE = Architecture(
    "qwen3moe",
    checkpoints=(TEXT,),
    attention=ATTENTION + QK_NORMS,
    mlp=(),
    experts=EXPERTS,
)
