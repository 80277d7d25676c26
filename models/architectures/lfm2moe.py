"""LFM2 with experts."""

from __future__ import annotations

from ..architecture import Architecture, Routing
from ..architecture_tensors import (
    ATTENTION,
    CONVOLUTION,
    EXPERTS,
    OUTPUT_BESIDE_EMBEDDING,
    QK_NORMS,
    SELECTION_BIAS,
)

ARCHITECTURE = Architecture(
    "lfm2moe",
    output=OUTPUT_BESIDE_EMBEDDING,
    attention=ATTENTION + QK_NORMS,
    convolution=CONVOLUTION,
    experts=EXPERTS + SELECTION_BIAS,
    routing=Routing(gating=None, scaled=False),
    metadata=lambda config: {"expert_weights_norm": True},
)
