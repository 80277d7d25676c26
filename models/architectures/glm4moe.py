"""Describes the architecture of GLM-4.5, 4.6 and 4.7."""

from __future__ import annotations

from .base import Architecture, CheckpointClass, Routing, Stored
from .tensor_tables import (
    ATTENTION,
    EXPERTS,
    NORMS_AFTER_ATTENTION,
    QK_NORMS,
    SELECTION_BIAS,
    SHARED_EXPERT,
    optional,
)

ARCHITECTURE = Architecture(
    "glm4moe",
    checkpoints=(
        CheckpointClass(
            "Glm4MoeForCausalLM",
            stored=tuple(
                Stored(f"mlp.shared_experts.{name}_proj", (f"ffn_{name}_shexp",))
                for name in ("gate", "up", "down")
            ),
            defaults={
                "partial_rotary_factor": 0.5,
                "norm_topk_prob": True,
                "routed_scaling_factor": 1.0,
            },
            biases={"attention_bias": ("qkv",)},
            tensors={"use_qk_norm": ("attn_q_norm", "attn_k_norm")},
            partial_rope=True,
            keys={
                "expert_count": "n_routed_experts",
                "expert_used_count": "num_experts_per_tok",
                "expert_feed_forward_length": "moe_intermediate_size",
                "expert_shared_count": "n_shared_experts",
                "expert_weights_norm": "norm_topk_prob",
                "expert_weights_scale": "routed_scaling_factor",
                "leading_dense_block_count": "first_k_dense_replace",
            },
            optional_keys={
                "expert_group_count": "n_group",
                "expert_group_used_count": "topk_group",
            },
            implied={"scoring_func": lambda _: "sigmoid", "topk_method": lambda _: "noaux_tc"},
            further_layers="num_nextn_predict_layers",
        ),
    ),
    attention=ATTENTION + optional(QK_NORMS),
    norms=NORMS_AFTER_ATTENTION,
    experts=EXPERTS + SHARED_EXPERT + SELECTION_BIAS,
    routing=Routing(gating=None, normalize=False),
)
