"""Qwen 3.5 and 3.6 with experts."""

from __future__ import annotations

import dataclasses

from ..architecture_tensors import EXPERTS, SHARED_EXPERT, SHARED_EXPERT_GATE
from . import qwen35

ARCHITECTURE = dataclasses.replace(
    qwen35.ARCHITECTURE,
    name="qwen35moe",
    checkpoints=(),
    mlp=(),
    experts=EXPERTS + SHARED_EXPERT + SHARED_EXPERT_GATE,
)
