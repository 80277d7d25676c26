"""Describes the architecture of jina-embeddings-v2: BERT with ALiBi and GEGLU.

jina-embeddings-v2-base-code also normalizes queries and keys, and the attention's output once more.
Its checkpoints hold the gate's rows after those of `up`.
"""

from __future__ import annotations

import dataclasses

from .base import Architecture, CheckpointClass, Stored
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
        Tensor("attn_q_norm", "attention.q_norm", "attention.self.layer_norm_q", "q", bias="norm"),
        Tensor("attn_k_norm", "attention.k_norm", "attention.self.layer_norm_k", "kv", bias="norm"),
        Tensor("attn_norm_2", "attention.second_norm", "layer_norm_1", "hidden", bias="norm"),
    )
)

_MLP = (*GATED_BERT_MLP[:2], dataclasses.replace(GATED_BERT_MLP[2], bias="down"))

_JINA_BERT = CheckpointClass(
    "JinaBertModel",
    stored=(
        Stored("mlp.up_gated_layer", ("ffn_up", "ffn_gate"), optional=True),
        Stored("mlp.down_layer", ("ffn_down",), optional=True),
        Stored("layer_norm_2", ("layer_output_norm",), optional=True),
        Stored("mlp.gated_layers", ("ffn_gate", "ffn_up")),
        Stored("mlp.wo", ("ffn_down",)),
        Stored("mlp.layernorm", ("layer_output_norm",)),
    ),
    tensor_names=((r"^bert\.", ""), (r"^encoder\.layer\.", "model.layers.")),
    unused=r"embeddings\.(position|token_type)_ids|(pooler|cls)\..*",
    held=("token_types",),
    together=tuple(norm.gguf for norm in _NORMS),
    held_biases=("qkv", "attention_output", "down"),
    required=(),
    defaults={"max_position_embeddings": 512, "layer_norm_eps": 1e-12},
    renamed={"rms_norm_eps": "layer_norm_eps"},
    accepted={"position_embedding_type": ("alibi",), "type_vocab_size": ..., "emb_pooler": ...},
    implied={"feed_forward_type": lambda _: "geglu"},
    computed=lambda fields: {
        "tokenizer.ggml.token_type_count": fields.integer("type_vocab_size", 2, least=0)
    },
)

ARCHITECTURE = Architecture(
    "jina-bert-v2",
    checkpoints=(_JINA_BERT, dataclasses.replace(_JINA_BERT, name="JinaBertForMaskedLM")),
    input=(WORDS, TOKEN_TYPES, EMBEDDING_NORM),
    output=optional((Tensor("cls", "head.output", None, "labels hidden", bias="labels"),)),
    attention=BERT_ATTENTION,
    norms=SUM_NORMS + _NORMS,
    mlp=_MLP,
    fused=("ffn_up",),
    biases=("norm",),
    layer_norm=True,
    rotated=lambda layer, windowed: False,
    activation="gelu_erf",
    bidirectional=True,
    alibi=8.0,
)
