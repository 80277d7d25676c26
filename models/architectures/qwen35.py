"""Describes the architecture of Qwen 3.5 and 3.6."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ..support.json_fields import JSONFields
from .base import Architecture, CheckpointClass, Stored
from .qwen2vl import rope_sections
from .tensor_tables import DELTA, GATED_ATTENTION, NORMS_AFTER_ATTENTION, QK_NORMS

#: Gated delta net tensors; checkpoints order value heads by key head.
_QKV = Stored("linear_attn.in_proj_qkv", ("attn_qkv",), value_heads=(0, "delta_head"))
_GATE = Stored("linear_attn.in_proj_z", ("attn_gate",), value_heads=(0, "delta_head"))
#: Gated delta net tensors that all classes store alike.
STORED = (
    Stored("linear_attn.conv1d", ("ssm_conv1d",), channels=True, value_heads=(0, "delta_head")),
    Stored("linear_attn.dt_bias", ("ssm_dt",), value_heads=(0, "one")),
    Stored("linear_attn.A_log", ("ssm_a",), suffix="", logarithms=True, value_heads=(0, "one")),
    Stored("linear_attn.norm", ("ssm_norm",), plain=True),
    Stored("linear_attn.out_proj", ("ssm_out",), value_heads=(1, "delta_head")),
)


def inner_size(fields: JSONFields) -> dict[str, Any]:
    """Returns metadata with the total size of a token's values in a gated delta net."""
    size = functools.partial(fields.integer, least=1, most=1 << 12)
    return {"ssm.inner_size": size("linear_value_head_dim") * size("linear_num_value_heads")}


TEXT = CheckpointClass(
    "Qwen3_5ForCausalLM",
    stored=(
        *STORED,
        _QKV,
        _GATE,
        Stored("linear_attn.in_proj_a", ("ssm_alpha",), value_heads=(0, "one")),
        Stored("linear_attn.in_proj_b", ("ssm_beta",), value_heads=(0, "one")),
    ),
    defaults={  # transformers' Qwen3_5TextConfig
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    partial_rope=True,
    sections=True,
    free_sections=True,
    biases={"attention_bias": ("qkv", "attention_output")},
    keys={
        "full_attention_interval": "full_attention_interval",
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
    implied={
        "attn_output_gate": lambda _: True,
    },
    computed=inner_size,
    further_tensors="mtp.",
)
TEXT_AND_IMAGES = dataclasses.replace(
    TEXT, name="Qwen3_5ForConditionalGeneration", text_config=True
)

ARCHITECTURE = Architecture(
    "qwen35",
    checkpoints=(TEXT, TEXT_AND_IMAGES),
    attention=GATED_ATTENTION + QK_NORMS,
    delta=DELTA,
    norms=NORMS_AFTER_ATTENTION,
    tiled_heads=True,
    output_gate=True,
    predicts_further=True,
    metadata=rope_sections,
    norm_offset=1.0,
)
