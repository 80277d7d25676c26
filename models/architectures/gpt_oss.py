"""Describes the architecture of gpt-oss."""

from __future__ import annotations

from .base import Architecture, CheckpointClass, Stored
from .tensor_tables import ATTENTION, EXPERTS, NORMS_AFTER_ATTENTION, SINKS

ARCHITECTURE = Architecture(
    "gpt-oss",
    checkpoints=(
        CheckpointClass(
            "GptOssForCausalLM",
            stored=(
                Stored("self_attn.sinks", ("attn_sinks",), bare=True),
                Stored("mlp.router", ("ffn_gate_inp",)),
                Stored(
                    "mlp.experts.gate_up_proj",
                    ("ffn_gate_exps", "ffn_up_exps"),
                    alternating=True,
                    transposed=True,
                    bare=True,
                ),
                Stored("mlp.experts.down_proj", ("ffn_down_exps",), transposed=True, bare=True),
            ),
            required=("num_key_value_heads", "head_dim", "sliding_window"),
            defaults={"rope_theta": 150000.0},
            window=True,
            keys={
                "expert_count": "num_local_experts",
                "expert_used_count": "num_experts_per_tok",
                "expert_feed_forward_length": "intermediate_size",
            },
            zero_biases={"attention_bias": ("qkv", "attention_output")},
            implied={
                "swiglu_limit": lambda _: 7.0,
                "swiglu_alpha": lambda _: 1.702,
            },
            rope_needed=True,
        ),
    ),
    attention=ATTENTION + SINKS,
    norms=NORMS_AFTER_ATTENTION,
    mlp=(),
    experts=EXPERTS,
    biases=("qkv", "attention_output", "router", "experts"),
    activation="swiglu_oai",
    windowed=lambda layer: layer % 2 == 0,
    window=128,
)
