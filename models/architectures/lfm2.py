"""Describes the architecture of LFM2."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..support.json_fields import JSONFields
from .base import MAX_LAYERS, Architecture, CheckpointClass, Stored
from .tensor_tables import ATTENTION, CONVOLUTION, OUTPUT_BESIDE_EMBEDDING, QK_NORMS

STORED = (
    Stored("self_attn.out_proj", ("attn_output",)),
    Stored("self_attn.q_layernorm", ("attn_q_norm",)),
    Stored("self_attn.k_layernorm", ("attn_k_norm",)),
    Stored("conv.conv", ("shortconv.conv",), channels=True),
    Stored("conv.conv.bias", ("shortconv.conv",), suffix="bias"),
    Stored("operator_norm", ("attn_norm",)),
    Stored("ffn_norm", ("ffn_norm",)),
    Stored("feed_forward.w1", ("ffn_gate",)),
    Stored("feed_forward.w3", ("ffn_up",)),
    Stored("feed_forward.w2", ("ffn_down",)),
)


def kv_heads(fields: JSONFields) -> dict[str, Any]:
    """Returns metadata with the number of KV heads per layer; 0 for layers with a convolution."""
    layers = fields.integer("num_hidden_layers", least=1, most=MAX_LAYERS)
    count = fields.integer("num_key_value_heads", least=1, most=1 << 24)
    if (types := fields.array("layer_types", None)) is not None:
        attention = [kind != "conv" for kind in types]
    else:
        indices = fields.array("full_attn_idxs", list(range(layers)))
        attention = [i in indices for i in range(layers)]
    return {"attention.head_count_kv": np.where(attention, count, 0).astype(np.int32)}


def sizes(fields: JSONFields) -> dict[str, Any]:
    """Returns metadata with KV heads and the inner size.

    config.json may give the inner size before its adjustment, which is then computed here.
    """
    key = "block_ff_dim" if "block_ff_dim" in fields else "intermediate_size"
    inner = fields.integer(key, least=1, most=1 << 24)
    if fields.boolean("block_auto_adjust_ff_dim", True):
        multiplier = fields.number("block_ffn_dim_multiplier", 1.0, above=0.0, most=1e6)
        multiple = fields.integer("block_multiple_of", 256, least=1, most=1 << 24)
        inner = int(multiplier * int(2 * inner / 3))
        inner = -(-inner // multiple) * multiple
    return {**kv_heads(fields), "feed_forward_length": inner}


TEXT = CheckpointClass(
    "Lfm2ForCausalLM",
    stored=STORED,
    renamed={"rms_norm_eps": "norm_eps"},
    defaults={"rope_theta": 1e6},
    keys={"shortconv.l_cache": "conv_L_cache"},
    computed=sizes,
    biases={"conv_bias": ("convolution",)},
    tensors={"conv_bias": ("shortconv.conv",)},
    tied=True,
    tied_key="tie_embedding",
)

ARCHITECTURE = Architecture(
    "lfm2",
    checkpoints=(TEXT,),
    output=OUTPUT_BESIDE_EMBEDDING,
    attention=ATTENTION + QK_NORMS,
    convolution=CONVOLUTION,
    windowed=lambda layer: True,
    local_rope_theta="global",
)
