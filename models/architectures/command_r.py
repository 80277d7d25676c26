"""Command R, and R+ with its norms of queries and keys."""

from __future__ import annotations

from ..architecture import Architecture
from ..architecture_tensors import ATTENTION, HEADWISE_QK_NORMS, PARALLEL_NORM

ARCHITECTURE = Architecture(
    "command-r",
    attention=ATTENTION + HEADWISE_QK_NORMS,
    norms=PARALLEL_NORM,
    layer_norm=True,
    interleaved_rope=True,
    logit_scale=lambda given: given,
)
