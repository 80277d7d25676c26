"""Llama 1 to 3, Mistral, and what is built like them."""

from __future__ import annotations

from ..architecture import Architecture, CheckpointClass

ARCHITECTURE = Architecture(
    "llama",
    checkpoints=(
        # Early files leave num_key_value_heads out where it equals num_attention_heads.
        CheckpointClass("LlamaForCausalLM", required=(), biases=("attention_bias", "mlp_bias")),
        CheckpointClass("MistralForCausalLM", window=True),
    ),
    interleaved_rope=True,
)
