"""Phi 3, 3.5 and 4."""

from __future__ import annotations

from ..architecture import Architecture

ARCHITECTURE = Architecture(
    "phi3",
    fused=("attn_qkv", "ffn_up"),
    windowed=lambda layer: False,  # files have a window, which llama.cpp leaves out
)
