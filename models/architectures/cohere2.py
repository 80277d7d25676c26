"""Command R7B and A."""

from __future__ import annotations

from ..architecture import Architecture
from ..architecture_tensors import PARALLEL_NORM

ARCHITECTURE = Architecture(
    "cohere2",
    norms=PARALLEL_NORM,
    layer_norm=True,
    interleaved_rope=True,
    rotated=lambda layer, windowed: windowed,
    windowed=lambda layer: layer % 4 < 3,
    window=4096,
    logit_scale=lambda given: given,
)
