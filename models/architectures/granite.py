"""Granite 3 and 4, dense."""

from __future__ import annotations

from ..architecture import Architecture

ARCHITECTURE = Architecture(
    "granite",
    interleaved_rope=True,
    optional_rope=True,
    scales=("embedding_scale", "residual_scale", "attention.scale"),
    logit_scale=lambda given: 1 / given,
)
