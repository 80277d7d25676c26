"""Describes the architecture of EmbeddingGemma: Gemma 3 with attention to all tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from . import gemma2, gemma3
from .base import CheckpointClass
from .encoder_tables import DENSE
from .tensor_tables import INPUT, OUTPUT


def _metadata(fields: Any) -> Mapping[str, Any]:
    """Returns metadata of a config.json; raises CheckpointError for that of a decoder."""
    if not fields.boolean("use_bidirectional_attention", False):
        fields.fail("use_bidirectional_attention", "is not true, but a decoder has an lm_head")
    return gemma2.query_factor(fields)


_TEXT: CheckpointClass = dataclasses.replace(
    gemma3.TEXT,
    name="Gemma3TextModel",
    accepted={"use_bidirectional_attention": (True,)},
    computed=_metadata,
)

ARCHITECTURE = dataclasses.replace(
    gemma3.ARCHITECTURE,
    name="gemma-embedding",
    checkpoints=(_TEXT,),
    input=INPUT[:1],
    output=(OUTPUT[0], *DENSE),
    final_soft_cap=None,
    attention_scale=None,
    bidirectional=True,
)
