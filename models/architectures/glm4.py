"""Describes the architecture of GLM-4 and GLM-Z1 (2025)."""

from __future__ import annotations

from .base import Architecture, CheckpointClass, Stored
from .tensor_tables import NORMS_AND_POST_NORMS

ARCHITECTURE = Architecture(
    "glm4",
    checkpoints=(
        CheckpointClass(
            "Glm4ForCausalLM",
            stored=(
                Stored("post_self_attn_layernorm", ("post_attention_norm",)),
                Stored("post_attention_layernorm", ("ffn_norm",)),
                Stored("post_mlp_layernorm", ("post_ffw_norm",)),
                Stored("mlp.gate_up_proj", ("ffn_gate", "ffn_up")),
            ),
            interleaved_rope=True,
            required=("num_key_value_heads", "head_dim"),
            defaults={"attention_bias": True, "partial_rotary_factor": 0.5},
            biases={"attention_bias": ("qkv",)},
            partial_rope=True,
        ),
    ),
    norms=NORMS_AND_POST_NORMS,
    fused=("ffn_up",),
    interleaved_rope=True,
)
