"""Qwen 3 VL, text."""

from __future__ import annotations

from ..architecture import Architecture
from ..architecture_tensors import ATTENTION, QK_NORMS
from .qwen2vl import rope_sections

ARCHITECTURE = Architecture(
    "qwen3vl",
    attention=ATTENTION + QK_NORMS,
    metadata=rope_sections,
)
