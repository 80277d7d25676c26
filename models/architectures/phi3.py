"""Describes the architecture of Phi 3, 3.5 and 4."""

from __future__ import annotations

from .base import Architecture, CheckpointClass, Stored

ARCHITECTURE = Architecture(
    "phi3",
    checkpoints=(
        CheckpointClass(
            "Phi3ForCausalLM",
            stored=(
                Stored("self_attn.qkv_proj", ("attn_q", "attn_k", "attn_v")),
                Stored("mlp.gate_up_proj", ("ffn_gate", "ffn_up")),
            ),
            required=(),
            defaults={"original_max_position_embeddings": 4096},
            window=True,
            windowed=lambda fields, layer: True,
            partial_rope=True,
        ),
    ),
    fused=("attn_qkv", "ffn_up"),
    windowed=lambda layer: False,  # GGUF files have a window, which llama.cpp ignores
)
