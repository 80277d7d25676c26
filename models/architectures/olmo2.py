"""OLMo 2 and 3."""

from __future__ import annotations

from ..architecture import Architecture
from ..architecture_tensors import ATTENTION, POST_NORMS, WIDE_QK_NORMS

ARCHITECTURE = Architecture(
    "olmo2",
    attention=ATTENTION + WIDE_QK_NORMS,
    norms=POST_NORMS,
    windowed=lambda layer: layer % 4 < 3,  # of OLMo 3, whose files have a window
    local_rope_theta="global",
)
