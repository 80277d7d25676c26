"""Describes the architecture of Granite 3 and 4 with experts."""

from __future__ import annotations

import dataclasses

from . import granite
from .base import Stored
from .tensor_tables import EXPERTS, SHARED_EXPERT

TEXT = dataclasses.replace(
    granite.TEXT,
    name="GraniteMoeForCausalLM",
    stored=(
        Stored("block_sparse_moe.router.layer", ("ffn_gate_inp",)),
        Stored(
            "block_sparse_moe.input_linear",
            ("ffn_gate_exps", "ffn_up_exps"),
        ),
        Stored("block_sparse_moe.output_linear", ("ffn_down_exps",)),
    ),
    biases={"attention_bias": ("qkv", "attention_output")},
    keys={
        **granite.TEXT.keys,
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
)
WITH_SHARED_EXPERT = dataclasses.replace(
    TEXT,
    name="GraniteMoeSharedForCausalLM",
    stored=(
        *TEXT.stored,
        Stored("shared_mlp.input_linear", ("ffn_gate_shexp", "ffn_up_shexp")),
        Stored("shared_mlp.output_linear", ("ffn_down_shexp",)),
    ),
    optional_keys={"expert_shared_feed_forward_length": "shared_intermediate_size"},
)

ARCHITECTURE = dataclasses.replace(
    granite.ARCHITECTURE,
    name="granitemoe",
    checkpoints=(TEXT, WITH_SHARED_EXPERT),
    experts=EXPERTS + SHARED_EXPERT,
    optional_rope=False,
)
