"""GLM-4.5, 4.6 and 4.7."""

from __future__ import annotations

import dataclasses

from ..architecture import Architecture, Routing
from ..architecture_tensors import (
    ATTENTION,
    EXPERTS,
    NORMS_AFTER_ATTENTION,
    QK_NORMS,
    SELECTION_BIAS,
    SHARED_EXPERT,
)

ARCHITECTURE = Architecture(
    "glm4moe",
    attention=ATTENTION + tuple(dataclasses.replace(t, required=False) for t in QK_NORMS),
    norms=NORMS_AFTER_ATTENTION,
    experts=EXPERTS + SHARED_EXPERT + SELECTION_BIAS,
    routing=Routing(gating=None, normalize=None),
)
