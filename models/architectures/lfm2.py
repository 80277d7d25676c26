"""LFM2."""

from __future__ import annotations

from ..architecture import Architecture
from ..architecture_tensors import ATTENTION, CONVOLUTION, OUTPUT_BESIDE_EMBEDDING, QK_NORMS

ARCHITECTURE = Architecture(
    "lfm2",
    output=OUTPUT_BESIDE_EMBEDDING,
    attention=ATTENTION + QK_NORMS,
    convolution=CONVOLUTION,
    windowed=lambda layer: True,
    local_rope_theta="global",
)
