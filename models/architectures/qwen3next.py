"""Describes the architecture of Qwen 3 Next."""

from __future__ import annotations

import dataclasses

from . import qwen35, qwen35moe
from .base import Stored
from .tensor_tables import DELTA, Tensor

#: Projection to, for each key head, the betas of its value heads and then their alphas.
BETA_ALPHA = Tensor("ssm_ba", "delta.beta_alpha", "linear_attn.in_proj_ba", "delta_heads*2 hidden")

_QKVZ = Stored(
    "linear_attn.in_proj_qkvz",
    ("attn_qkv", "attn_gate"),
    groups="key_heads",
    parts=(
        ("attn_qkv", "delta_key"),
        ("attn_qkv", "delta_key"),
        ("attn_qkv", "values_of_key_head"),
        ("attn_gate", "values_of_key_head"),
    ),
)
_TEXT = qwen35moe.with_experts(qwen35.TEXT, "Qwen3NextForCausalLM")

ARCHITECTURE = dataclasses.replace(
    qwen35moe.ARCHITECTURE,
    name="qwen3next",
    checkpoints=(
        dataclasses.replace(
            _TEXT,
            stored=(*qwen35.STORED, *qwen35moe.STORED, _QKVZ),
            sections=False,
            defaults={**_TEXT.defaults, "norm_topk_prob": True},
            keys={**_TEXT.keys, "expert_weights_norm": "norm_topk_prob"},
        ),
    ),
    delta=(BETA_ALPHA, *(t for t in DELTA if t.gguf not in ("ssm_alpha", "ssm_beta"))),
    tiled_heads=False,
    metadata=lambda config: {},
)
