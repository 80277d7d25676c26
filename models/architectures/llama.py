"""Llama 1 to 3, Mistral, Mixtral, and what is built like them."""

from __future__ import annotations

from ..architecture import Architecture, CheckpointClass
from ..architecture_tensors import EXPERTS, SHARED_EXPERT

ARCHITECTURE = Architecture(
    "llama",
    checkpoints=(
        CheckpointClass(
            "LlamaForCausalLM",
            required=(),  # early files leave out heads of keys where all heads have their own
            biases={"attention_bias": ("qkv", "attention_output"), "mlp_bias": ("mlp",)},
        ),
        CheckpointClass("MistralForCausalLM", window=True),
    ),
    experts=EXPERTS + SHARED_EXPERT,
    interleaved_rope=True,
)
