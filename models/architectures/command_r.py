"""Describes the architecture of Command R and R+, which has norms of queries and keys."""

from __future__ import annotations

from .base import Architecture, CheckpointClass
from .tensor_tables import ATTENTION, HEADWISE_QK_NORMS, PARALLEL_NORM

TEXT = CheckpointClass(
    "CohereForCausalLM",
    interleaved_rope=True,
    required=(),
    defaults={"logit_scale": 0.0625, "layer_norm_eps": 1e-5, "rope_theta": 500000.0},
    renamed={"rms_norm_eps": "layer_norm_eps"},
    biases={"attention_bias": ("qkv", "attention_output")},
    tensors={"use_qk_norm": ("attn_q_norm", "attn_k_norm")},
    keys={"logit_scale": "logit_scale"},
    tied=True,
)

ARCHITECTURE = Architecture(
    "command-r",
    checkpoints=(TEXT,),
    attention=ATTENTION + HEADWISE_QK_NORMS,
    norms=PARALLEL_NORM,
    layer_norm=True,
    interleaved_rope=True,
    logit_scale=lambda scale: scale,
)
