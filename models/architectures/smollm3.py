"""SmolLM 3."""

from __future__ import annotations

from ..architecture import Architecture

ARCHITECTURE = Architecture(
    "smollm3",
    interleaved_rope=True,
    rotated=lambda layer, windowed: layer % 4 < 3,
)
