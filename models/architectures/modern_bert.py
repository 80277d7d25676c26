"""Describes the architecture of ModernBERT."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..support.json_fields import JSONFields
from . import layer_types
from .base import Architecture, CheckpointClass, Stored
from .encoder_tables import BERT_ATTENTION, EMBEDDING_NORM, GATED_BERT_MLP, HEAD, WORDS, labels
from .tensor_tables import NORMS, OUTPUT


def _all_but_the_first_of_every(fields: JSONFields, layer: int) -> bool:
    return layer % fields.integer("global_attn_every_n_layers", 3, least=1) > 0


def _metadata(fields: Any) -> Mapping[str, Any]:
    """Returns metadata of a config.json."""
    windowed = np.array(layer_types.read(fields, _all_but_the_first_of_every))
    found: dict[str, Any] = {"attention.sliding_window_pattern": windowed}
    pooling = fields.string("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        fields.fail("classifier_pooling", f"is {pooling[:50]!r}, expected cls or mean")
    return found | {"classifier.pooling_type": {"mean": 1, "cls": 2}[pooling]}


_MODERN_BERT = CheckpointClass(
    "ModernBertModel",
    stored=(
        Stored("attn.Wqkv", ("attn_q", "attn_k", "attn_v")),
        Stored("attn.Wo", ("attn_output",)),
        Stored("mlp.Wi", ("ffn_gate", "ffn_up")),
        Stored("mlp.Wo", ("ffn_down",)),
        Stored("attn_norm", ("attn_norm",)),
        Stored("mlp_norm", ("ffn_norm",)),
        Stored("embeddings.tok_embeddings", ("token_embd",)),
        Stored("embeddings.norm", ("token_embd_norm",)),
        Stored("final_norm", ("output_norm",)),
        Stored("head.dense", ("cls",)),
        Stored("classifier", ("cls.output",)),
    ),
    tensor_names=((r"^model\.", ""), (r"^layers\.", "model.layers.")),
    unused=r"(head|decoder)\..*",
    required=(),
    defaults={"norm_eps": 1e-5, "local_attention": 128},
    renamed={
        "rms_norm_eps": "norm_eps",
        "rope_theta": "global_rope_theta",
    },
    optional_keys={"rope.freq_base_swa": "local_rope_theta"},
    keys={"attention.sliding_window": "local_attention"},
    accepted={
        "global_attn_every_n_layers": ...,
        "classifier_pooling": ...,
        "position_embedding_type": ("absolute",),
    }
    | dict.fromkeys(
        (
            "classifier_activation",
            "decoder_bias",
            "deterministic_flash_attn",
            "reference_compile",
            "repad_logits_with_grad",
            "sparse_prediction",
            "sparse_pred_ignore_index",
        ),
        ...,
    ),
    implied={
        "attention_bias": lambda _: False,
        "mlp_bias": lambda _: False,
        "norm_bias": lambda _: False,
        "classifier_bias": lambda _: False,
    },
    rope_by_type=True,
    computed=_metadata,
)

ARCHITECTURE = Architecture(
    "modern-bert",
    checkpoints=(
        _MODERN_BERT,
        dataclasses.replace(_MODERN_BERT, name="ModernBertForMaskedLM"),
        dataclasses.replace(
            _MODERN_BERT,
            name="ModernBertForSequenceClassification",
            tensor_names=(*_MODERN_BERT.tensor_names, (r"^head\.norm\.", "classifier_norm.")),
            stored=(*_MODERN_BERT.stored, Stored("classifier_norm", ("cls.norm",))),
            unused=r"decoder\..*",
            held=("cls", "cls.norm", "cls.output"),
            held_biases=("labels",),
            computed=lambda fields: {**_metadata(fields), **labels(fields)},
        ),
    ),
    input=(WORDS, EMBEDDING_NORM),
    output=(OUTPUT[0], *HEAD),
    attention=BERT_ATTENTION,
    norms=(dataclasses.replace(NORMS[0], where="later_layer"), NORMS[1]),
    mlp=GATED_BERT_MLP,
    fused=("attn_qkv", "ffn_up"),
    layer_norm=True,
    local_rope_theta="global",
    windowed=lambda layer: layer % 3 > 0,
    full_first=True,
    activation="gelu_erf",
    bidirectional=True,
    head_activation="gelu_erf",
    head_pooling="mean",
)
