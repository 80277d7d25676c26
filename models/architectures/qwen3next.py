"""Qwen 3 Next."""

from __future__ import annotations

import dataclasses

from ..architecture_tensors import DELTA, Tensor
from . import qwen35moe

#: For each key head, the betas of its value heads and then their alphas.
BETA_ALPHA = Tensor("ssm_ba", "delta.beta_alpha", "linear_attn.in_proj_ba", "delta_heads*2 hidden")

ARCHITECTURE = dataclasses.replace(
    qwen35moe.ARCHITECTURE,
    name="qwen3next",
    checkpoints=(),
    delta=(BETA_ALPHA, *(t for t in DELTA if t.gguf not in ("ssm_alpha", "ssm_beta"))),
    tiled_heads=False,
    metadata=lambda config: {},
)
