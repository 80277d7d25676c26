"""Describes the architecture of Gemma 3 (text decoder)."""

from __future__ import annotations

import dataclasses
import functools

from . import gemma2
from .base import Architecture, CheckpointClass
from .layer_types import all_but_every
from .tensor_tables import ATTENTION, NORMS_AND_POST_NORMS, QK_NORMS

_LAYERS_OF_27B = 62

TEXT = CheckpointClass(
    "Gemma3ForCausalLM",
    required=("num_key_value_heads", "head_dim"),
    biases={"attention_bias": ("qkv", "attention_output")},
    defaults={"rope_theta": 1e6, "sliding_window": 4096, "query_pre_attn_scalar": 256},
    window=True,
    windowed=all_but_every(6, "sliding_window_pattern"),
    rope_by_type=True,
    optional_keys={
        "rope.freq_base_swa": "rope_local_base_freq",  # transformers 4
        "final_logit_softcapping": "final_logit_softcapping",
    },
    computed=functools.partial(gemma2.query_factor, layers_of_27b=_LAYERS_OF_27B),
    implied={
        "attn_logit_softcapping": lambda _: None,
    },
    tied=True,
)
TEXT_AND_IMAGES = dataclasses.replace(
    TEXT,
    name="Gemma3ForConditionalGeneration",
    text_config=True,
    defaults={  # transformers' Gemma3TextConfig
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        **TEXT.defaults,
    },
)

ARCHITECTURE = Architecture(
    "gemma3",
    checkpoints=(TEXT, TEXT_AND_IMAGES),
    attention=ATTENTION + QK_NORMS,
    norms=NORMS_AND_POST_NORMS,
    activation="gelu",
    windowed=lambda layer: layer % 6 < 5,
    final_soft_cap=0.0,
    local_rope_theta=10000.0,
    embedding_scale=lambda config: config.hidden_size**0.5,
    attention_scale=functools.partial(gemma2.attention_scale, layers_of_27b=_LAYERS_OF_27B),
    norm_offset=1.0,
)
