"""Qwen 3.5 and 3.6."""

from __future__ import annotations

from ..architecture import Architecture
from ..architecture_tensors import DELTA, GATED_ATTENTION, NORMS_AFTER_ATTENTION, QK_NORMS
from .qwen2vl import rope_sections

ARCHITECTURE = Architecture(
    "qwen35",
    attention=GATED_ATTENTION + QK_NORMS,
    delta=DELTA,
    norms=NORMS_AFTER_ATTENTION,
    tiled_heads=True,
    output_gate=True,
    metadata=rope_sections,
)
