"""Describes the architecture of Gemma 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Architecture, CheckpointClass
from .tensor_tables import NORMS_AND_POST_NORMS

if TYPE_CHECKING:
    from ..config import Config


def query_pre_attn_scalar(config: Config, *, layers_of_27b: int = 46) -> int:
    """Returns the number whose square root divides attention scores.

    GGUF has no key for it, so the 27B model is recognized by its number of layers.
    """
    is_27b = config.num_layers == layers_of_27b
    return config.hidden_size // config.num_heads if is_27b else config.head_dim


ARCHITECTURE = Architecture(
    "gemma2",
    checkpoints=(
        CheckpointClass(
            "Gemma2ForCausalLM",
            required=("num_key_value_heads", "head_dim", "sliding_window"),
            defaults={"query_pre_attn_scalar": 256},
            window=True,
            keys={
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            implied={"query_pre_attn_scalar": query_pre_attn_scalar},
            tied=True,
        ),
    ),
    norms=NORMS_AND_POST_NORMS,
    activation="gelu",
    windowed=lambda layer: layer % 2 == 0,
    window=4096,
    attention_soft_cap=50.0,
    final_soft_cap=30.0,
    embedding_scale=lambda config: config.hidden_size**0.5,
    attention_scale=lambda config: query_pre_attn_scalar(config) ** -0.5,
    norm_offset=1.0,
)
