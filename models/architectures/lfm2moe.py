"""Describes the architecture of LFM2 with experts."""

from __future__ import annotations

import dataclasses

from . import lfm2
from .base import Architecture, Routing, Stored
from .qwen3moe import EXPERT_KEYS
from .tensor_tables import (
    ATTENTION,
    CONVOLUTION,
    EXPERTS,
    OUTPUT_BESIDE_EMBEDDING,
    QK_NORMS,
    SELECTION_BIAS,
)

TEXT = dataclasses.replace(
    lfm2.TEXT,
    name="Lfm2MoeForCausalLM",
    stored=(
        *lfm2.STORED,
        Stored("feed_forward.gate", ("ffn_gate_inp",)),
        Stored("feed_forward.expert_bias", ("exp_probs_b",)),
        Stored("feed_forward.experts.{expert}.w1", ("ffn_gate_exps",)),
        Stored("feed_forward.experts.{expert}.w3", ("ffn_up_exps",)),
        Stored("feed_forward.experts.{expert}.w2", ("ffn_down_exps",)),
    ),
    keys={
        **lfm2.TEXT.keys,
        **EXPERT_KEYS,
        "leading_dense_block_count": "num_dense_layers",
        "expert_weights_norm": "norm_topk_prob",
        "expert_weights_scale": "routed_scaling_factor",
    },
    defaults={**lfm2.TEXT.defaults, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
    zero_biases={"use_expert_bias": ("exp_probs_b",)},
    computed=lambda fields: {**lfm2.kv_heads(fields), "expert_gating_func": 2},
)

ARCHITECTURE = Architecture(
    "lfm2moe",
    checkpoints=(TEXT,),
    output=OUTPUT_BESIDE_EMBEDDING,
    attention=ATTENTION + QK_NORMS,
    convolution=CONVOLUTION,
    experts=EXPERTS + SELECTION_BIAS,
    routing=Routing(gating=None),
    metadata=lambda config: {"expert_weights_norm": config.experts.normalize},
)
