"""Qwen 2 VL and 2.5 VL, text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..architecture import Architecture

if TYPE_CHECKING:
    from ..config import Config


def rope_sections(config: Config) -> dict[str, Any]:
    """Pairs that rotate by time, height and width, which are equal for every token of text."""
    eighth = config.rope_dim // 8
    space = (config.rope_dim // 2 - eighth) // 2
    time = config.rope_dim // 2 - 2 * space
    return {"rope.dimension_sections": np.array([time, space, space, 0], np.int32)}


ARCHITECTURE = Architecture(
    "qwen2vl",
    biases=("qkv",),
    metadata=rope_sections,
)
