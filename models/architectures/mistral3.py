"""Ministral 3, Devstral 2."""

from __future__ import annotations

import dataclasses

from ..architecture import Architecture, CheckpointClass
from ..architecture_tensors import EXPERTS, SHARED_EXPERT

TEXT = CheckpointClass("Ministral3ForCausalLM", window=True)

ARCHITECTURE = Architecture(
    "mistral3",
    checkpoints=(
        TEXT,
        dataclasses.replace(
            TEXT, name="Mistral3ForConditionalGeneration", text_config=True, tied=True
        ),
    ),
    experts=EXPERTS + SHARED_EXPERT,
    interleaved_rope=True,
    yarn_keys=True,
    temperature=True,
)
