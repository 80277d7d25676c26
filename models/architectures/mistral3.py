"""Ministral 3, Devstral 2."""

from __future__ import annotations

from ..architecture import Architecture
from ..architecture_tensors import EXPERTS, SHARED_EXPERT

ARCHITECTURE = Architecture(
    "mistral3",
    experts=EXPERTS + SHARED_EXPERT,
    interleaved_rope=True,
    yarn_keys=True,
    temperature=True,
)
