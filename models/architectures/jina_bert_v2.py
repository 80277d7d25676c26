"""Describes the architecture of jina-embeddings-v2: BERT with ALiBi and GEGLU."""

from __future__ import annotations

from .base import Architecture
from .encoder_tables import (
    BERT_ATTENTION,
    EMBEDDING_NORM,
    GATED_BERT_MLP,
    SUM_NORMS,
    TOKEN_TYPES,
    WORDS,
)
from .tensor_tables import Tensor, optional

_NORMS = optional(
    (
        Tensor("attn_q_norm", "attention.q_norm", None, "q", bias="norm"),
        Tensor("attn_k_norm", "attention.k_norm", None, "kv", bias="norm"),
        Tensor("attn_norm_2", "attention.second_norm", None, "hidden", bias="norm"),
    )
)

ARCHITECTURE = Architecture(
    "jina-bert-v2",
    input=(WORDS, TOKEN_TYPES, EMBEDDING_NORM),
    output=optional((Tensor("cls", "head.output", None, "labels hidden", bias="labels"),)),
    attention=BERT_ATTENTION,
    norms=SUM_NORMS + _NORMS,
    mlp=GATED_BERT_MLP,
    fused=("ffn_up",),
    biases=("norm",),
    layer_norm=True,
    rotated=lambda layer, windowed: False,
    activation="gelu_erf",
    bidirectional=True,
    alibi=8.0,
)
