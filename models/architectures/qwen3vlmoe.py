"""Qwen 3 VL with experts, text."""

from __future__ import annotations

import dataclasses

from . import qwen3moe
from .qwen2vl import rope_sections

ARCHITECTURE = dataclasses.replace(qwen3moe.ARCHITECTURE, name="qwen3vlmoe", metadata=rope_sections)
