"""Describes the architecture of jina-embeddings-v3: XLM-RoBERTa with rope.

transformers saves the publisher's names. The publisher's folder also holds a LoRA adapter per task
(`files/checkpoints/task_adapters.py`); embeddings without a task have the base weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from . import nomic_bert
from .base import CheckpointClass, Stored
from .encoder_tables import BERT_MLP

#: Rows of RoBERTa's table of positions before the first, which max_position_embeddings counts.
_BEFORE = 2


def _metadata(fields: Any) -> Mapping[str, Any]:
    """Returns metadata of a config.json."""
    positions = fields.integer("max_position_embeddings", least=_BEFORE + 1)
    return {
        "tokenizer.ggml.token_type_count": fields.integer("type_vocab_size", 1, least=0),
        "context_length": positions - _BEFORE,
    }


def _published(fields: Any) -> Mapping[str, Any]:
    """Like `_metadata`, for the publisher's folder; its class defaults to another base of rope."""
    if "rotary_emb_base" not in fields:
        fields.fail("rotary_emb_base", "is missing")
    return _metadata(fields)


_BASE = CheckpointClass(
    "JinaEmbeddingsV3Model",
    stored=(
        Stored("mixer.Wqkv", ("attn_q", "attn_k", "attn_v")),
        Stored("mixer.out_proj", ("attn_output",)),
        Stored("mlp.fc1", ("ffn_up",)),
        Stored("mlp.fc2", ("ffn_down",)),
        Stored("norm1", ("attn_output_norm",)),
        Stored("norm2", ("layer_output_norm",)),
        Stored("emb_ln", ("token_embd_norm",)),
    ),
    tensor_names=(
        (r"^roberta\.", ""),
        (r"\.parametrizations\.weight\.original$", ".weight"),
        (r"^encoder\.layers\.", "model.layers."),
    ),
    unused=r"embeddings\.position_ids|(pooler|lm_head)\..*|.*\.parametrizations\.weight\.0\.lora_[AB]",
    held=("token_types",),
    held_biases=("qkv", "attention_output", "mlp"),
    required=(),
    defaults={
        "vocab_size": 250002,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 8194,
        "layer_norm_eps": 1e-5,
        "rope_theta": 20000.0,
    },
    renamed={"rms_norm_eps": "layer_norm_eps"},
    computed=_metadata,
)
_PUBLISHED = dataclasses.replace(
    _BASE,
    name="XLMRobertaModel",
    selected_by="lora_adaptations",
    computed=_published,
    published={"rotary_emb_base": "rope_theta"},
    accepted={"position_embedding_type": ("rotary",)}
    | dict.fromkeys(
        (
            "emb_pooler",
            "load_trained_adapters",
            "lora_alpha",
            "lora_adaptations",
            "lora_dropout_p",
            "lora_main_params_trainable",
            "lora_rank",
            "matryoshka_dimensions",
            "task_instructions",
            "truncate_dim",
            "type_vocab_size",
            "use_reentrant",
        ),
        ...,
    ),
)

ARCHITECTURE = dataclasses.replace(
    nomic_bert.ARCHITECTURE,
    name="jina-bert-v3",
    checkpoints=(
        _BASE,
        dataclasses.replace(_BASE, name="JinaEmbeddingsV3ForMaskedLM"),
        _PUBLISHED,
    ),
    mlp=BERT_MLP,
    activation="gelu_erf",
)
