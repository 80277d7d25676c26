"""Describes the architecture of nomic-embed-text: BERT with rope and SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Architecture, CheckpointClass, Stored
from .encoder_tables import (
    BERT_ATTENTION,
    EMBEDDING_NORM,
    GATED_BERT_MLP,
    SUM_NORMS,
    TOKEN_TYPES,
    WORDS,
)

#: Keys of the publisher's config.json that its class defaults to other values than transformers.
_PUBLISHED = ("rotary_emb_base", "rotary_emb_fraction")


def _metadata(fields: Any) -> Mapping[str, Any]:
    """Returns metadata of a config.json in the form of transformers or of the publisher.

    The publisher's code scales rope beyond `max_trained_positions`, where the context ends here, as
    in llama.cpp.
    """
    found = {"tokenizer.ggml.token_type_count": fields.integer("type_vocab_size", 2, least=0)}
    if "n_embd" not in fields:
        return found
    for key in _PUBLISHED:
        if key not in fields:
            fields.fail(key, "is missing")
    trained = fields.integer("max_trained_positions", 2048, least=1)
    return {**found, "context_length": min(trained, fields.integer("n_positions"))}


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
    published={
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
        "rotary_emb_base": "rope_theta",
    },
    implied={
        "activation_function": lambda _: "swiglu",
        "rotary_emb_fraction": lambda _: 1.0,
        "rotary_emb_scale_base": lambda _: None,
    }
    | dict.fromkeys(
        (
            "causal",
            "mlp_fc1_bias",
            "mlp_fc2_bias",
            "parallel_block",
            "parallel_block_tied_norm",
            "prenorm",
            "qkv_proj_bias",
            "rotary_emb_interleaved",
            "use_rms_norm",
        ),
        lambda _: False,
    ),
    accepted=dict.fromkeys(
        (
            "dense_seq_output",
            "expert_choice_router",
            "ffn_div",
            "fused_bias_fc",
            "fused_dropout_add_ln",
            "max_trained_positions",
            "moe_every_n_layers",
            "moe_impl",
            "moe_normalize_expert_weights",
            "moe_resid_pdrop",
            "moe_top_k",
            "num_shared_experts",
            "pad_vocab_size_multiple",
            "reorder_and_upcast_attn",
            "rotary_scaling_factor",
            "router_aux_loss_coef",
            "scale_attn_by_inverse_layer_idx",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
            "type_vocab_size",
            "use_rotary_pos_emb",
            "use_xentropy",
        ),
        ...,
    ),
    computed=_metadata,
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
