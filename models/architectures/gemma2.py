"""Describes the architecture of Gemma 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..support.json_fields import JSONFields
from .base import NO_CAP, QUERY_FACTOR, Architecture, CheckpointClass
from .tensor_tables import NORMS_AND_POST_NORMS

if TYPE_CHECKING:
    from ..config import Config


def attention_scale(config: Config, *, layers_of_27b: int = 46) -> float:
    """Returns the factor of attention scores.

    Like llama.cpp, recognizes the 27B model by its number of layers; files have no key for it.
    """
    is_27b = config.num_layers == layers_of_27b
    return _size(is_27b, config.hidden_size, config.num_heads, config.head_dim) ** -0.5


def query_factor(fields: JSONFields, *, layers_of_27b: int = 46) -> dict[str, Any]:
    """Returns metadata with the factor of queries that turns `attention_scale` into config.json's.

    It is empty for a factor of 1.
    """
    sizes = map(fields.integer, ("hidden_size", "num_attention_heads", "head_dim"))
    implied = _size(fields.integer("num_hidden_layers") == layers_of_27b, *sizes)
    size = fields.number("query_pre_attn_scalar", above=0.0, most=1e12)
    return {} if size == implied else {QUERY_FACTOR: float(np.float32((implied / size) ** 0.5))}


def _size(is_27b: bool, hidden_size: int, heads: int, head_dim: int) -> int:
    return hidden_size // max(heads, 1) if is_27b else head_dim


def caps_and_query_factor(fields: JSONFields) -> dict[str, Any]:
    """Returns metadata with the soft caps, which null turns off, and `query_factor`."""
    keys = "attn_logit_softcapping", "final_logit_softcapping"
    caps = {key: fields.number(key, NO_CAP, above=0.0, most=NO_CAP) for key in keys}
    return caps | query_factor(fields)


ARCHITECTURE = Architecture(
    "gemma2",
    checkpoints=(
        CheckpointClass(
            "Gemma2ForCausalLM",
            required=("num_key_value_heads", "head_dim", "sliding_window"),
            biases={"attention_bias": ("qkv", "attention_output")},
            defaults={
                "query_pre_attn_scalar": 256,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            window=True,
            computed=caps_and_query_factor,
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
    attention_scale=attention_scale,
    norm_offset=1.0,
)
