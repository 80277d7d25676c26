"""Describes the architecture of Gemma 4 (text decoder)."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from ..support.json_fields import JSONFields
from . import layer_types
from .base import MAX_LAYERS, Architecture, CheckpointClass, Stored
from .tensor_tables import (
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

if TYPE_CHECKING:
    from ..config import Config

_QUERY, _KEY, _VALUE, _OUTPUT = ATTENTION
_BEFORE, _AFTER, *_OF_NETWORK = NORMS_AND_POST_NORMS


def windowed_layers(fields: JSONFields) -> list[bool]:
    """Returns whether each layer is windowed; the last never is, as in transformers."""
    return [*layer_types.read(fields, layer_types.all_but_every(6))[:-1], False]


def sizes(fields: JSONFields) -> dict[str, Any]:
    """Returns metadata with the sizes that differ between layers: heads and inner sizes."""
    layers = fields.integer("num_hidden_layers", least=1, most=MAX_LAYERS)
    windowed = windowed_layers(fields)
    full = [i for i in range(layers) if not windowed[i]]
    key, vocab_size = "vocab_size_per_layer_input", fields.integer("vocab_size")
    if fields.integer("hidden_size_per_layer_input") and fields.integer(key) != vocab_size:
        fields.fail(key, f"is {fields.integer(key)}, expected vocab_size={vocab_size}")
    size = functools.partial(fields.integer, least=1, most=1 << 24)
    local, kv_local = size("head_dim"), size("num_key_value_heads")
    head_dim, kv_heads = _of_full_layers(fields, layers, full, local, kv_local)
    values: dict[str, Any] = {
        "attention.sliding_window_pattern": np.array(windowed),
        "attention.head_count_kv": np.array(
            [kv_heads if i in full else kv_local for i in range(layers)], np.int32
        ),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 0.0),
        "embedding_length_per_layer_input": fields.integer("hidden_size_per_layer_input"),
    }
    for suffix, dim in (("", head_dim), ("_swa", local)):
        keys = ("attention.key_length", "attention.value_length", "rope.dimension_count")
        values |= {f"{key}{suffix}": dim for key in keys}
    if fields.boolean("use_double_wide_mlp"):
        inner, shared = size("intermediate_size"), fields.integer("num_kv_shared_layers")
        first = layers - shared
        values["feed_forward_length"] = np.array(
            [inner * (2 if 0 < first <= i else 1) for i in range(layers)], np.int32
        )
    if fields.boolean("enable_moe_block"):
        values |= {
            "expert_count": fields.integer("num_experts"),
            "expert_used_count": fields.integer("top_k_experts"),
            "expert_feed_forward_length": fields.integer("moe_intermediate_size"),
        }
    return values


def _of_full_layers(
    fields: JSONFields, layers: int, full: list[int], head_dim: int, kv_heads: int
) -> tuple[int, int]:
    """Returns head_dim and the number of KV heads of the layers with full attention.

    Reads per_layer_config, or two keys in earlier files.
    """
    per_layer = fields.object("per_layer_config")
    if per_layer is None:
        said = fields.boolean("attention_k_eq_v") and "num_global_key_value_heads" in fields
        if said:
            kv_heads = fields.integer("num_global_key_value_heads", least=1, most=1 << 24)
        return fields.integer("global_head_dim", 512), kv_heads
    known = {str(i) for i in full}
    for layer in per_layer.values:
        if layer not in known:
            per_layer.fail(layer, f"must be one of the layers with full attention, {full}")
    found = []
    for i in full:
        of_layer = per_layer.object(str(i)) or JSONFields({}, fields.file)
        if other := of_layer.values.keys() - {"head_dim", "num_key_value_heads"}:
            of_layer.fail(min(other), "is not supported")
        sizes = (
            of_layer.integer("head_dim", head_dim),
            of_layer.integer("num_key_value_heads", kv_heads, least=1, most=1 << 24),
        )
        found.append(sizes)
        if sizes != found[0]:
            per_layer.fail(str(i), f"gives {sizes}, expected {found[0]} as in layer {full[0]}")
    return found[0] if found else (head_dim, kv_heads)


def without_values(config: Config, layer: int) -> tuple[str, ...]:
    """Returns the tensors that a layer lacks if attention_k_eq_v is set.

    Layers with full attention then use their keys as values.
    """
    return () if config.window_of(layer) is not None else ("attn_v",)


TEXT = CheckpointClass(
    "Gemma4ForCausalLM",
    stored=(
        Stored("layer_scalar", ("layer_output_scale",), bare=True),
        Stored("router.scale", ("ffn_gate_inp",), suffix="scale"),
        Stored("router.per_expert_scale", ("ffn_down_exps",), suffix="scale"),
        Stored("experts.gate_up_proj", ("ffn_gate_exps", "ffn_up_exps"), bare=True),
        Stored("experts.down_proj", ("ffn_down_exps",), bare=True),
    ),
    defaults={  # transformers' Gemma4TextConfig
        "vocab_size": 262144,
        "max_position_embeddings": 131072,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "num_kv_shared_layers": 0,
        "attention_k_eq_v": False,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
        },
    },
    held=("attn_v", "layer_output_scale"),
    lacking={"attention_k_eq_v": without_values},
    window=True,
    keys={"attention.shared_kv_layers": "num_kv_shared_layers"},
    computed=sizes,
    biases={"attention_bias": ("qkv", "attention_output")},
    accepted={
        "use_bidirectional_attention": ("vision",),  # only for images
        "per_layer_config": ...,
    },
    tied=True,
)
TEXT_AND_IMAGES = dataclasses.replace(TEXT, name="Gemma4ForConditionalGeneration", text_config=True)

ARCHITECTURE = Architecture(
    "gemma4",
    checkpoints=(TEXT, TEXT_AND_IMAGES),
    input=INPUT + PER_LAYER_INPUT,
    # Layers without attn_v use the key projection as values.
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
    rope_freqs=True,
    embedding_scale=lambda config: config.hidden_size**0.5,
    attention_scale=lambda config: 1.0,
    metadata=lambda config: {  # llama.cpp requires it
        "attention.sliding_window_pattern": np.array(config.windowed_by_layer)
    },
)
