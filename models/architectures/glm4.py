"""GLM-4 and GLM-Z1, of 2025."""

from __future__ import annotations

from ..architecture import Architecture
from ..architecture_tensors import NORMS_AND_POST_NORMS

ARCHITECTURE = Architecture(
    "glm4",
    norms=NORMS_AND_POST_NORMS,
    fused=("ffn_up",),
    interleaved_rope=True,
)
