"""Describes the architecture of nomic-embed-text: BERT with rope and SwiGLU."""

from __future__ import annotations

from .base import Architecture, CheckpointClass, Stored
from .encoder_tables import (
    BERT_ATTENTION,
    EMBEDDING_NORM,
    GATED_BERT_MLP,
    SUM_NORMS,
    TOKEN_TYPES,
    WORDS,
)

_NOMIC_BERT = CheckpointClass(
    "NomicBertModel",
    stored=(
        Stored("attn.Wqkv", ("attn_q", "attn_k", "attn_v")),
        Stored("attn.out_proj", ("attn_output",)),
        Stored("mlp.fc11", ("ffn_up",)),
        Stored("mlp.fc12", ("ffn_gate",)),
        Stored("mlp.fc2", ("ffn_down",)),
        Stored("norm1", ("attn_output_norm",)),
        Stored("norm2", ("layer_output_norm",)),
        Stored("emb_ln", ("token_embd_norm",)),
    ),
    tensor_names=((r"^bert\.", ""), (r"^encoder\.layers\.", "model.layers.")),
    unused=r"embeddings\.position_ids|(pooler|cls)\..*",
    held=("token_types",),
    required=(),
    defaults={"rope_theta": 1000.0, "layer_norm_eps": 1e-12},
    renamed={"rms_norm_eps": "layer_norm_eps"},
    accepted={"type_vocab_size": ...},
    computed=lambda fields: {
        "tokenizer.ggml.token_type_count": fields.integer("type_vocab_size", 2, least=0)
    },
)

ARCHITECTURE = Architecture(
    "nomic-bert",
    checkpoints=(_NOMIC_BERT,),
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
