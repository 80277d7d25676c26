"""Describes the architecture of Llama 1 to 3, Mistral, Mixtral and similar models."""

from __future__ import annotations

from .base import Architecture, CheckpointClass, Stored
from .tensor_tables import EXPERTS, SHARED_EXPERT

ARCHITECTURE = Architecture(
    "llama",
    checkpoints=(
        CheckpointClass(
            "LlamaForCausalLM",
            required=(),  # early files omit num_key_value_heads if it equals the number of heads
            biases={"attention_bias": ("qkv", "attention_output"), "mlp_bias": ("mlp",)},
        ),
        CheckpointClass("MistralForCausalLM", defaults={"sliding_window": 4096}, window=True),
        CheckpointClass(
            "MixtralForCausalLM",
            stored=(
                Stored("block_sparse_moe.gate", ("ffn_gate_inp",)),
                Stored("block_sparse_moe.experts.{expert}.w1", ("ffn_gate_exps",)),
                Stored("block_sparse_moe.experts.{expert}.w2", ("ffn_down_exps",)),
                Stored("block_sparse_moe.experts.{expert}.w3", ("ffn_up_exps",)),
            ),
            defaults={"rope_theta": 1000000.0},
            window=True,
            keys={
                "expert_count": "num_local_experts",
                "expert_used_count": "num_experts_per_tok",
            },
        ),
    ),
    experts=EXPERTS + SHARED_EXPERT,
    interleaved_rope=True,
    rope_freqs=True,
)
