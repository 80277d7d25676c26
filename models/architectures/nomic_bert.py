"""Describes the architecture of nomic-embed-text: BERT with rope and SwiGLU."""

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

ARCHITECTURE = Architecture(
    "nomic-bert",
    input=(WORDS, TOKEN_TYPES, EMBEDDING_NORM),
    output=(),
    attention=BERT_ATTENTION,
    norms=SUM_NORMS,
    mlp=GATED_BERT_MLP,
    fused=("attn_qkv",),
    biases=("norm",),
    layer_norm=True,
    bidirectional=True,
)
