"""Describes the architecture of DeepSeek V2 and V3, and GLM 4.7 Flash."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from ..support.json_fields import JSONFields
from .base import GROUP_BEST, Architecture, CheckpointClass, Routing, Stored
from .tensor_tables import EXPERTS, LATENT_ATTENTION, SELECTION_BIAS, SHARED_EXPERT, optional

if TYPE_CHECKING:
    from ..config import Config


def attention_scale(config: Config) -> float:
    """Returns m**2 / sqrt(head_dim), with YaRN's magnitude m (https://arxiv.org/abs/2309.00071).

    m includes the magnitude of the rope, as in llama.cpp; converted checkpoints have 1 there.
    """
    if config.yarn is None:
        return 1 / math.sqrt(config.head_dim)
    log_multiplier, stretch = config.yarn[2], math.log(max(config.rope_factor, 1.0))
    magnitude = config.rope_magnitude * (1.0 if log_multiplier else 1 + 0.1 * stretch)
    return (magnitude * (1 + log_multiplier * stretch)) ** 2 / math.sqrt(config.head_dim)


def default_gating(layers: int, vocab_size: int) -> str:
    """Returns the gating for files without that key; recognizes GLM 4.7 Flash by its sizes."""
    is_glm = layers in (47, 48) and vocab_size == 154880
    return "sigmoid" if is_glm else "softmax"


def sizes(fields: JSONFields) -> dict[str, Any]:
    """Returns metadata with the sizes of heads and of the latent vector."""
    rank, rope_dim = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim")
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope_dim,
        "attention.value_length": rank,
        "attention.key_length_mla": fields.integer("qk_nope_head_dim") + rope_dim,
    }


def with_softmax(fields: JSONFields) -> dict[str, Any]:
    """Returns metadata with `sizes` and the routing of DeepSeek V2.

    Like transformers, reads groups of experts only if topk_method selects by groups, and ignores
    norm_topk_prob.
    """
    values = {**sizes(fields), "expert_gating_func": 1, "expert_weights_norm": False}
    method = fields.string("topk_method", "greedy")
    if method == "greedy":
        return values
    if method != "group_limited_greedy":
        supported = "greedy, group_limited_greedy"
        fields.fail("topk_method", f"{method[:100]!r} is not supported; supported: {supported}")
    return values | {
        "expert_group_count": fields.integer("n_group"),
        "expert_group_used_count": fields.integer("topk_group"),
        GROUP_BEST: 1,
    }


def with_sigmoid(fields: JSONFields) -> dict[str, Any]:
    """Returns metadata with `sizes` and the routing of DeepSeek V3."""
    return {**sizes(fields), "expert_gating_func": 2}


def of_glm(fields: JSONFields) -> dict[str, Any]:
    """Returns metadata as for DeepSeek V3, and the number of dense layers before MoE layers."""
    layers = fields.array("mlp_layer_types", None)
    dense = fields.integer("first_k_dense_replace", 1)
    if layers is not None:
        dense = layers.index("sparse") if "sparse" in layers else len(layers)
        expected = fields.integer("num_hidden_layers", least=dense, most=1024) - dense
        if layers != ["dense"] * dense + ["sparse"] * expected:
            fields.fail("mlp_layer_types", "must list dense layers first, then sparse ones")
    return {**with_sigmoid(fields), "leading_dense_block_count": dense}


_KV_B = ("attn_k_b", "key_part"), ("attn_v_b", "value")

V3 = CheckpointClass(
    "DeepseekV3ForCausalLM",
    stored=(
        Stored("self_attn.kv_b_proj", ("attn_k_b",), groups="heads", parts=_KV_B, transposed=True),
        Stored("self_attn.kv_b_proj", ("attn_v_b",), groups="heads", parts=_KV_B),
        *(
            Stored(f"mlp.shared_experts.{name}_proj", (f"ffn_{name}_shexp",))
            for name in ("gate", "up", "down")
        ),
    ),
    interleaved_rope=True,
    interleave_key="rope_interleave",
    required=("n_group", "topk_group"),
    defaults={"norm_topk_prob": True},
    keys={
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.value_length_mla": "v_head_dim",
        "rope.dimension_count": "qk_rope_head_dim",
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_norm": "norm_topk_prob",
        "expert_weights_scale": "routed_scaling_factor",
        "leading_dense_block_count": "first_k_dense_replace",
    },
    optional_keys={
        "attention.q_lora_rank": "q_lora_rank",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    },
    computed=with_sigmoid,
    biases={"attention_bias": ("qkv", "attention_output")},
    implied={
        "num_key_value_heads": lambda config: config.num_heads,
        "moe_layer_freq": lambda _: 1,
        "scoring_func": lambda _: "sigmoid",
        "topk_method": lambda _: "noaux_tc",
    },
    held=("exp_probs_b",),
    further_layers="num_nextn_predict_layers",
)
V2 = dataclasses.replace(
    V3,
    name="DeepseekV2ForCausalLM",
    interleave_key=None,
    required=(),
    defaults={},
    keys={key: name for key, name in V3.keys.items() if name != "norm_topk_prob"},
    optional_keys={"attention.q_lora_rank": "q_lora_rank"},
    computed=with_softmax,
    biases={**V3.biases, "mlp_bias": ("mlp",)},
    implied={
        **{key: value for key, value in V3.implied.items() if key != "topk_method"},
        "scoring_func": lambda _: "softmax",
    },
    held=(),
)
GLM = dataclasses.replace(
    V3,
    name="Glm4MoeLiteForCausalLM",
    required=(),
    keys={key: n for key, n in V3.keys.items() if n != "first_k_dense_replace"},
    computed=of_glm,
    implied={**V3.implied, "head_dim": lambda config: config.rope_dim},  # one key in transformers
)

ARCHITECTURE = Architecture(
    "deepseek2",
    checkpoints=(V3, V2, GLM),
    attention=LATENT_ATTENTION,
    experts=EXPERTS + SHARED_EXPERT + optional(SELECTION_BIAS),
    routing=Routing(gating=None, normalize=False, default_gating=default_gating),
    interleaved_rope=True,
    yarn_keys=True,
    latent=True,
    scales=("attention.scale",),
    attention_scale=attention_scale,
)
