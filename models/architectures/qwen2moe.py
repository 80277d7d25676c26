"""Describes the architecture of Qwen 1.5 and 2 with experts."""

from __future__ import annotations

from ..support.json_fields import JSONFields
from .base import Architecture, CheckpointClass, Routing, Stored
from .qwen3moe import EXPERT_KEYS
from .tensor_tables import EXPERTS, SHARED_EXPERT, SHARED_EXPERT_GATE


def windowed(fields: JSONFields, layer: int) -> bool:
    """Tells whether a layer is windowed: every other one of the first max_window_layers."""
    return layer % 2 == 0 and layer < fields.integer("max_window_layers", least=0)


ARCHITECTURE = Architecture(
    "qwen2moe",
    checkpoints=(
        CheckpointClass(
            "Qwen2MoeForCausalLM",
            stored=(Stored("mlp.shared_expert_gate", ("ffn_gate_inp_shexp",), as_row=True),),
            defaults={
                "sliding_window": 4096,
                "max_window_layers": 28,
                "norm_topk_prob": False,
            },
            window="use_sliding_window",
            windowed=windowed,
            keys={
                **EXPERT_KEYS,
                "expert_weights_norm": "norm_topk_prob",
                "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            },
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
