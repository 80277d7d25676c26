"""Qwen 1.5 and 2 with experts."""

from __future__ import annotations

from ..architecture import Architecture, Routing
from ..architecture_tensors import EXPERTS, SHARED_EXPERT, SHARED_EXPERT_GATE

ARCHITECTURE = Architecture(
    "qwen2moe",
    mlp=(),
    experts=EXPERTS + SHARED_EXPERT + SHARED_EXPERT_GATE,
    biases=("qkv",),
    routing=Routing(normalize=False),
)
