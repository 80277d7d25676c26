"""Describes the architecture of Qwen 1.5 and 2 with experts."""

from __future__ import annotations

from .base import Architecture, CheckpointClass, Routing, Stored
from .qwen3moe import EXPERT_KEYS
from .tensor_tables import EXPERTS, SHARED_EXPERT, SHARED_EXPERT_GATE

ARCHITECTURE = Architecture(
    "qwen2moe",
    checkpoints=(
        CheckpointClass(
            "Qwen2MoeForCausalLM",
            stored=(Stored("mlp.shared_expert_gate", ("ffn_gate_inp_shexp",), as_row=True),),
            window="use_sliding_window",
            keys={
                **EXPERT_KEYS,
                "expert_weights_norm": "norm_topk_prob",
                "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            },
            defaults={"norm_topk_prob": False},
            zero_biases={"qkv_bias": ("qkv",)},
            implied={
                "mlp_only_layers": lambda _: [],
                "decoder_sparse_step": lambda _: 1,
            },
        ),
    ),
    mlp=(),
    experts=EXPERTS + SHARED_EXPERT + SHARED_EXPERT_GATE,
    biases=("qkv",),
    routing=Routing(normalize=False),
)
