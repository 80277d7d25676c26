"""Describes the architecture of Ministral 3 and Devstral 2."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..support.json_fields import JSONFields
from .base import Architecture, CheckpointClass
from .tensor_tables import EXPERTS, SHARED_EXPERT


def of_text(fields: JSONFields) -> dict[str, Any]:
    """Raises CheckpointError if a key is missing whose default depends on the decoder's class.

    That class is mistral or ministral3. Returns no metadata.
    """
    needed = {"mistral": ("sliding_window",), "ministral3": ("head_dim", "rope_parameters")}
    kind = fields.string("model_type", "mistral")
    if kind not in needed:
        known = ", ".join(needed)
        fields.fail("model_type", f"{kind!r:.100} is not supported; supported: {known}")
    for key in needed[kind]:
        if key not in fields and not (key == "rope_parameters" and "rope_scaling" in fields):
            fields.fail(key, f"is missing, and {kind} has no default for it here")
    return {}


TEXT = CheckpointClass(
    "Ministral3ForCausalLM",
    required=("num_key_value_heads", "head_dim"),
    window=True,
    rope_needed=True,
)

ARCHITECTURE = Architecture(
    "mistral3",
    checkpoints=(
        TEXT,
        dataclasses.replace(
            TEXT,
            name="Mistral3ForConditionalGeneration",
            required=("num_key_value_heads",),
            computed=of_text,
            rope_needed=False,
            text_config=True,
            tied=True,
        ),
    ),
    experts=EXPERTS + SHARED_EXPERT,
    interleaved_rope=True,
    rope_freqs=True,
    yarn_keys=True,
    temperature=True,
)
