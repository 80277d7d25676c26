"""Describes the architecture of BERT, RoBERTa and XLM-RoBERTa."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .base import Architecture, CheckpointClass, Stored
from .encoder_tables import (
    BERT_ATTENTION,
    BERT_MLP,
    EMBEDDING_NORM,
    HEAD,
    POSITIONS,
    SUM_NORMS,
    TOKEN_TYPES,
    WORDS,
    labels,
)

#: RoBERTa's positions begin after the one of padding, whose number is 1.
_FIRST = 2


def _bert(fields: Any) -> Mapping[str, Any]:
    """Returns metadata of a config.json."""
    return {"tokenizer.ggml.token_type_count": fields.integer("type_vocab_size", 2, least=0)}


def _roberta(fields: Any) -> Mapping[str, Any]:
    """Like `_bert`, for RoBERTa."""
    if (padding := fields.integer("pad_token_id", _FIRST - 1)) != _FIRST - 1:
        fields.fail("pad_token_id", f"is {padding}, expected {_FIRST - 1}")
    positions = fields.integer("max_position_embeddings", 512, least=_FIRST + 1)
    return {**_bert(fields), "context_length": positions - _FIRST}


_BERT = CheckpointClass(
    "BertModel",
    tensor_names=(
        (r"^(bert|roberta)\.", ""),
        (r"^encoder\.layer\.", "model.layers."),
        (r"\.gamma$", ".weight"),
        (r"\.beta$", ".bias"),
    ),
    unused=r"embeddings\.(position|token_type)_ids|(pooler|cls|lm_head)\..*",
    held=("token_types",),
    required=(),
    defaults={
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
        "layer_norm_eps": 1e-12,
    },
    renamed={"rms_norm_eps": "layer_norm_eps"},
    accepted={
        "position_embedding_type": ("absolute",),
        "type_vocab_size": ...,
        "directionality": ...,
        "output_past": ...,
        "pooler_fc_size": ...,
        "pooler_num_attention_heads": ...,
        "pooler_num_fc_layers": ...,
        "pooler_size_per_head": ...,
        "pooler_type": ...,
    },
    computed=_bert,
)
_ROBERTA = dataclasses.replace(
    _BERT,
    name="RobertaModel",
    stored=(Stored("embeddings.position_embeddings", ("position_embd",), skipped=_FIRST),),
    defaults={**_BERT.defaults, "vocab_size": 50265, "layer_norm_eps": 1e-5},
    computed=_roberta,
)


def _reranker(base: CheckpointClass, name: str, **changes: Any) -> CheckpointClass:
    """Returns the class with a classification head."""
    return dataclasses.replace(
        base,
        name=name,
        held=(*base.held, "cls", "cls.output"),
        held_biases=("head", "labels"),
        computed=lambda fields: {**base.computed(fields), **labels(fields)},
        **changes,
    )


ARCHITECTURE = Architecture(
    "bert",
    checkpoints=(
        *(dataclasses.replace(_BERT, name=name) for name in ("BertModel", "BertForMaskedLM")),
        _reranker(
            _BERT,
            "BertForSequenceClassification",
            tensor_names=(
                *_BERT.tensor_names,
                (r"^classifier\.(weight|bias)$", r"classifier.out_proj.\1"),
                (r"^pooler\.", "classifier."),
            ),
        ),
        *(
            dataclasses.replace(_ROBERTA, name=f"{family}{kind}")
            for family in ("Roberta", "XLMRoberta", "Camembert")
            for kind in ("Model", "ForMaskedLM")
        ),
        _reranker(_ROBERTA, "RobertaForSequenceClassification"),
        _reranker(_ROBERTA, "XLMRobertaForSequenceClassification"),
    ),
    input=(WORDS, POSITIONS, TOKEN_TYPES, EMBEDDING_NORM),
    output=HEAD,
    attention=BERT_ATTENTION,
    norms=SUM_NORMS,
    mlp=BERT_MLP,
    biases=("qkv", "attention_output", "mlp", "norm"),
    layer_norm=True,
    rotated=lambda layer, windowed: False,
    activation="gelu_erf",
    bidirectional=True,
)
