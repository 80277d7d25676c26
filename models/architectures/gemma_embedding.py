"""Describes the architecture of EmbeddingGemma: Gemma 3 with attention to all tokens."""

from __future__ import annotations

import dataclasses

from . import gemma3
from .encoder_tables import DENSE
from .tensor_tables import INPUT, OUTPUT

ARCHITECTURE = dataclasses.replace(
    gemma3.ARCHITECTURE,
    name="gemma-embedding",
    checkpoints=(),
    input=INPUT[:1],
    output=(OUTPUT[0], *DENSE),
    final_soft_cap=None,
    attention_scale=None,
    bidirectional=True,
)
