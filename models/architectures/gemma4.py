"""Gemma 4, text."""

from __future__ import annotations

from ..architecture import Architecture
from ..architecture_tensors import (
    ATTENTION,
    DENSE_BESIDE_EXPERTS,
    GATED_MLP,
    INPUT,
    NORMS_AND_POST_NORMS,
    OUTPUT_SCALE,
    PER_LAYER,
    PER_LAYER_INPUT,
    QK_NORMS,
    optional,
)

_QUERY, _KEY, _VALUE, _OUTPUT = ATTENTION
_BEFORE, _AFTER, *_OF_NETWORK = NORMS_AND_POST_NORMS

ARCHITECTURE = Architecture(
    "gemma4",
    input=INPUT + PER_LAYER_INPUT,
    # Layers without values of their own take the keys' projection.
    attention=(_QUERY, _KEY, *optional((_VALUE,)), _OUTPUT, *QK_NORMS),
    norms=(_BEFORE, _AFTER),
    mlp=(*GATED_MLP, *_OF_NETWORK),
    experts=DENSE_BESIDE_EXPERTS,
    further=PER_LAYER + OUTPUT_SCALE,
    fused=("ffn_gate_up_exps",),
    activation="gelu",
    windowed=lambda layer: layer % 6 < 5,
    value_norm=True,
    varied_kv_heads=True,
    local_heads=True,
    per_layer_embeddings=True,
    final_soft_cap=30.0,
    local_rope_theta=10000.0,
    embedding_scale=lambda config: config.hidden_size**0.5,
    attention_scale=lambda config: 1.0,
)
