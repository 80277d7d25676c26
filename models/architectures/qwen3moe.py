"""Qwen 3 with experts."""

from __future__ import annotations

from ..architecture import Architecture
from ..architecture_tensors import ATTENTION, EXPERTS, QK_NORMS

ARCHITECTURE = Architecture(
    "qwen3moe",
    attention=ATTENTION + QK_NORMS,
    mlp=(),
    experts=EXPERTS,
)
