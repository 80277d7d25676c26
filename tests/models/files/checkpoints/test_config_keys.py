"""Keys of config.json: published ones load; unknown and contradictory ones are refused by name."""

from __future__ import annotations

import json
import re

import pytest
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k.models.architectures import ARCHITECTURES
from jax_q4k.models.files.checkpoints import config_json, config_keys
from jax_q4k.models.support import json_fields

FOLDER = GOLDEN.parent / "checkpoints"
CASES = {
    name: case["config"]
    for file in ("transformers.json", "transformers_hybrids.json")
    for name, case in json.loads((FOLDER / file).read_text()).items()
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
}
CLASSES = [c for architecture in ARCHITECTURES.values() for c in architecture.checkpoints]


def describe(config: dict) -> config_json.Description:
    return config_json.describe(json_fields.JSONFields(config, "config.json"))


def changed(name: str, outer: dict | None = None, **changes) -> dict:
    """A case's config.json with `changes` of its decoder and `outer` changes; null stays."""
    described = json.loads(json.dumps(CASES[name]))
    described.get("text_config", described).update(changes)
    return described | (outer or {})


def refused(config: dict, message: str) -> None:
    with pytest.raises(jq.CheckpointError, match=message):
        describe(config)


#: Keys of published config.json files of supported classes that do not describe the network.
PUBLISHED = {
    "phi3-long": {
        "_name_or_path": "Phi-3-mini-128k-instruct",
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
    },
    "deepseek2-lite": {
        "auto_map": {
            "AutoModel": "modeling_deepseek.DeepseekV2Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
        },
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "seq_aux": True,
        "torch_dtype": "bfloat16",
    },
    "cohere2": {
        "cache_implementation": "hybrid",
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "sliding_window_pattern": 4,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": False,
    },
    "starcoder2": {
        "activation_function": "gelu",
        "attention_softmax_in_fp32": True,
        "layer_norm_epsilon": 1e-5,
        "mlp_type": "default",
        "norm_type": "layer_norm",
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
    },
    "lfm2": {
        "block_dim": 256,
        "block_ff_dim": 256,
        "block_mlp_init_scale": 1.0,
        "block_norm_eps": 1e-5,
        "block_out_init_scale": 1.0,
        "block_use_swiglu": True,
        "block_use_xavier_init": True,
        "conv_dim": 256,
        "conv_dim_out": 256,
        "conv_use_xavier_init": True,
        "num_heads": 4,
        "use_pos_enc": True,
    },
    "qwen35": {
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "output_gate_type": "swish",
        "full_attention_interval": 4,
    },
    "smollm3": {
        "max_window_layers": 28,
        "pretraining_tp": 2,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "unsloth_fixed": True,
    },
    "qwen3moe": {"dual_chunk_attention_config": {"chunk_size": 262144}, "use_bfloat16": False},
    "granite": {"is_llama_config": True, "rope_interleaved": False, "tf_legacy_loss": False},
    "mistral3": {"compression_config": None, "bos_token": "<s>", "activation": "swiglu"},
    "mixtral": {"num_experts": 8, "task_specific_params": None, "id2label": {"0": "LABEL_0"}},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_keys(name):
    want = describe(CASES[name])
    found = describe(changed(name, **PUBLISHED[name]))
    assert found.config == want.config


@pytest.mark.parametrize("name", CASES)
def test_architectures_may_be_missing(name):
    assert (
        describe({**CASES[name], "architectures": None}).checkpoint
        == describe(CASES[name]).checkpoint
    )


def test_model_types():
    """Each class has one model type, and every type names an existing class."""
    named = [name for names in config_keys.CLASSES_OF_TYPES.values() for name in names]
    assert sorted(named) == sorted({checkpoint.name for checkpoint in CLASSES})
    unlike = {**LLAMA, "model_type": "kimi"}  # no supported class has it
    assert describe(unlike).checkpoint.name == "LlamaForCausalLM"


def test_keys_that_are_read_are_known(monkeypatch):
    """Collects the keys that are read while describing each case."""
    asked, value = set(), json_fields.JSONFields.value

    def collecting(self, key, *default):
        if self.prefix in ("", "text_config."):
            asked.add(key)
        return value(self, key, *default)

    monkeypatch.setattr(json_fields.JSONFields, "value", collecting)
    for config in CASES.values():
        describe(config)
    assert len(asked) > 60
    assert {key for key in asked if not config_keys.is_known(key)} == set()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3moe", {"qk_clip": 1}, "qk_clip: is 1, which is not supported"),
        ("qwen3vl", {"qk_layernorm": True}, "text_config.qk_layernorm: is True, which is not"),
        ("qwen3vl", {"scale_emb": 12}, "text_config.scale_emb: is 12, which is not supported"),
        ("mistral3", {"rope_scaling": {"rope_ratio": 2}}, "rope_scaling.rope_ratio: is 2, which"),
        ("qwen3vl", {"quantization": {"bits": 4}}, "quantization: is .*bits.*, which is not"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias: is True, which is not supported"),
        ("cohere2", {"rotary_pct": 0.5}, "rotary_pct: is 0.5"),
        ("gpt-oss", {"rope_parameters": None}, "rope_parameters: is missing, as is rope_scaling"),
        ("mistral3", {"head_dim": None}, "head_dim: is missing"),
        ("mistral3", {"rope_parameters": None}, "rope_parameters: is missing"),
        ("deepseek2", {"n_group": None}, "n_group: is missing"),
        ("qwen3moe", {"num_experts": 4}, "num_local_experts: is 16, but num_experts is 4"),
        ("deepseek2", {"num_local_experts": 4}, "num_local_experts: is 4, but n_routed_experts is"),
        ("deepseek2-noyarn", {"head_dim": 128}, "head_dim: is 128, which is not supported"),
        ("olmo3", {"rope_parameters": {"rope_theta": 1e4}}, "full_attention: is missing"),
        (
            "phi3-long",
            {"original_max_position_embeddings": 512},
            "original_max_position_embeddings: is 128, but outside rope_parameters it is 512",
        ),
    ],
)
def test_bad_keys_are_refused(name, changes, message):
    refused(changed(name, **changes), message)


def test_unknown_keys_are_ignored_with_one_warning(recwarn):
    config = changed("qwen3vl", {"//": "note", "new_gate": 1}, new_norm=2, qk_clip=0, scale_emb=1)
    config["text_config"]["rope_parameters"] |= {"new_ramp": 3, "attn_factor": 1.0}
    for key in ("init_device", "num_logits_to_keep", "unsloth_version", "vocab_file", "z_loss"):
        config["text_config"][key] = 1
    assert describe(config).config == describe(CASES["qwen3vl"]).config
    (only,) = (str(warning.message) for warning in recwarn.list)
    keys = "new_gate, text_config.new_norm, text_config.rope_parameters.new_ramp"
    assert only == f"config.json: unknown keys are ignored: {keys}"
    many = {f"k{i}": i for i in range(25)} | {"x" * 200: 1}
    with pytest.warns(match=r"ignored: k0, .*, k19 and 6 more$"):
        describe(changed("qwen3moe", **many))


def test_top_level_keys_of_a_nested_config_are_checked():
    refused(changed("qwen3vl", {"qk_clip": 1}), r"config.json: qk_clip: is 1, which is not")
    config = changed("qwen3vl", {"vocab_size": 5, "rope_theta": 7.0, "num_hidden_layers": 9})
    assert describe(config).config == describe(CASES["qwen3vl"]).config  # like transformers
    config = changed("qwen3vl", quantization_config={"quant_method": "hqq"})
    refused(config, "text_config.quantization_config: is 'hqq', which is not supported")


@pytest.mark.parametrize(
    ("early", "new", "outer", "message"),
    [
        ({"type": "linear", "factor": 2}, {"rope_type": "linear", "factor": 2}, {}, None),
        (
            {"type": "linear", "factor": 2},
            {"rope_type": "linear", "factor": 2, "rope_theta": 5e5},
            {"rope_theta": 5e5},
            None,
        ),
        ({"type": "linear", "factor": 2}, {"rope_type": "linear", "factor": 4}, {}, "in factor"),
        ({"type": "linear", "factor": 2}, {"rope_type": "yarn", "factor": 2}, {}, "in rope_type"),
        (
            {"type": "linear", "factor": 2},
            {"rope_type": "linear", "factor": 2, "rope_theta": 5e5},
            {},
            "in rope_theta",
        ),
        (
            {"type": "linear", "factor": 2},
            {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5},
            {},
            "in partial_rotary_factor",
        ),
        ({}, {"rope_type": "linear", "factor": 2}, {}, None),
    ],
)
def test_both_keys_of_rotary_positions(early, new, outer, message):
    """transformers 5 prefers rope_scaling, and theta at the top of config.json."""
    config = {**LLAMA, **outer, "rope_scaling": early, "rope_parameters": new}
    if message:
        refused(config, re.escape("rope_scaling: differs from rope_parameters " + message))
    else:
        found = describe(config).config
        assert (found.rope_factor, found.rope_theta) == (2.0, outer.get("rope_theta", 1e4))


def test_defaults_of_classes():
    """Defaults of transformers 5.24 for missing keys."""
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    mistral |= {"num_key_value_heads": 2, "max_position_embeddings": 32768}
    assert describe(mistral).config.windows == (4096,)
    assert describe({**mistral, "sliding_window": None}).config.windows == ()
    config = changed("qwen2vl", rope_parameters={"mrope_section": [8, 12, 12]})
    assert describe(config).config.rope_theta == 1e6
    config = changed("olmo3")
    del config["rope_parameters"]["sliding_attention"]["rope_theta"]
    assert describe(config).config.local_rope_theta == 5e5
    gemma = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    gemma |= {"num_key_value_heads": 2, "head_dim": 256}
    found = describe(gemma).config
    assert (found.rope_theta, found.local_rope_theta, found.window) == (1e6, 1e4, 4096)
    assert found.checkpoint_query_factor == 1  # 256 is the default of query_pre_attn_scalar
    assert describe({**gemma, "head_dim": 64}).config.checkpoint_query_factor == (64 / 256) ** 0.5
