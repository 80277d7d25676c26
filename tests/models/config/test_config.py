import numpy as np
import pytest

import jax_q4k as jq
from jax_q4k.models.architectures import ARCHITECTURES
from jax_q4k.models.architectures.base import GROUP_BEST
from jax_q4k.models.config import Config, metadata_keys
from jax_q4k.models.config.rope import Rope

LLAMA = {
    "general.architecture": "llama",
    "llama.context_length": 2048,
    "llama.embedding_length": 512,
    "llama.block_count": 2,
    "llama.feed_forward_length": 768,
    "llama.attention.head_count": 8,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 100,
}


def changed(changes):
    metadata = {**LLAMA, **{f"llama.{key}": value for key, value in changes.items()}}
    return {key: value for key, value in metadata.items() if value is not None}


def test_defaults_are_llama_cpps():
    config = Config.from_metadata(LLAMA)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 8, 64)
    assert (config.rope_dim, config.rope_theta, config.rope_factor) == (64, 10000.0, 1.0)
    assert config.interleaved_rope and not config.kind.biases and config.experts is None


@pytest.mark.parametrize(
    "architecture, biases, norms", [("qwen2", ("qkv",), []), ("qwen3", (), ["q_norm", "k_norm"])]
)
def test_qwen(architecture, biases, norms):
    metadata = {key.replace("llama", architecture): value for key, value in LLAMA.items()}
    metadata["general.architecture"] = architecture
    config = Config.from_metadata(metadata)
    names = [tensor.module.removeprefix("attention.") for tensor in config.kind.attention]
    assert config.kind.biases == biases and names[4:] == norms
    assert not config.interleaved_rope


@pytest.mark.parametrize(
    ("changes", "attribute", "value"),
    [
        ({"attention.head_count_kv": 2}, "num_kv_heads", 2),
        ({"attention.head_count_kv": np.array([2, 2], np.uint32)}, "num_kv_heads", 2),
        ({"attention.key_length": 128, "attention.value_length": 128}, "head_dim", 128),
        # 512 is no multiple of 7
        (
            {"attention.key_length": 64, "attention.head_count": 7},
            "num_heads",
            7,
        ),
        ({"rope.dimension_count": 32}, "rope_dim", 32),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, "rope_factor", 4.0),
        ({"rope.scaling.factor": 4.0}, "rope_factor", 4.0),
        ({"rope.scale_linear": 2.0}, "rope_factor", 2.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, "rope_factor", 1.0),
        ({"attention.sliding_window": 512}, "context_length", 512),
        ({"attention.sliding_window": 0}, "context_length", 2048),
        ({"attention.sliding_window": 4096}, "context_length", 2048),
        ({"expert_count": 0, "logit_scale": 1.0}, "num_layers", 2),
    ],
)
def test_keys(changes, attribute, value):
    assert getattr(Config.from_metadata(changed(changes)), attribute) == value


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention.head_count_kv": 2, "attention.key_length": 128, "attention.value_length": 128},
        {"rope.dimension_count": 32, "rope.freq_base": 5e5, "rope.scaling.factor": 4.0},
        {"attention.sliding_window": 512},
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_to_metadata_is_the_inverse(architecture, changes):
    metadata = {
        key.replace("llama", architecture): value for key, value in changed(changes).items()
    }
    config = Config.from_metadata({**metadata, "general.architecture": architecture})
    assert Config.from_metadata(config.to_metadata()) == config


def test_vocab_size_from_the_tokens():
    metadata = changed({"vocab_size": None}) | {"tokenizer.ggml.tokens": ["a", "b", "c"]}
    assert Config.from_metadata(metadata).vocab_size == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "llama.block_count: is missing"),
        ({"context_length": None}, "llama.context_length: is missing"),
        ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon: is missing"),
        ({"vocab_size": None}, "llama.vocab_size: is missing"),
        ({"block_count": 0}, "llama.block_count: must be an integer from 1 to 1024, not 0"),
        ({"block_count": 2**32}, "llama.block_count: must be an integer"),
        ({"block_count": True}, "llama.block_count: must be an integer"),
        ({"block_count": 2.0}, "llama.block_count: must be an integer"),
        ({"block_count": "2"}, "llama.block_count: must be an integer"),
        ({"embedding_length": 0}, "llama.embedding_length: must be"),
        (
            {"feed_forward_length": np.array([768, 0])},
            "llama.feed_forward_length: must hold integers from 1 to",
        ),
        (
            {"feed_forward_length": np.array([], int)},
            "llama.feed_forward_length: has 0 entries, expected one for each of 2 layers",
        ),
        (
            {"feed_forward_length": np.array([0.5, 1.5])},
            "llama.feed_forward_length: is not an array of integers",
        ),
        ({"attention.head_count": 0}, "head_count: must be an integer"),
        ({"attention.head_count": 7}, "head_count: 7 must divide embedding_length=512"),
        ({"attention.head_count_kv": 0}, "head_count_kv: must be"),
        ({"attention.head_count_kv": 3}, "head_count_kv: 3 must divide attention.head_count=8"),
        ({"attention.head_count_kv": 16}, "head_count_kv: must be an integer from 1 to 8, not 16"),
        (
            {"attention.key_length": 514},
            "a head_dim of 514 is not supported; at most 512",
        ),
        ({"attention.value_length": 128}, "value_length: 128 must equal the key length, 64"),
        ({"rope.dimension_count": 63}, "rope.dimension_count: 63 must be even"),
        ({"rope.dimension_count": 128}, "rope.dimension_count: must be an integer from 1 to 64"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "epsilon: must be a number above 0"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, "epsilon: must be a number above 0"),
        ({"attention.layer_norm_rms_epsilon": True}, "epsilon: must be a number above 0"),
        ({"rope.freq_base": -1.0}, "rope.freq_base: must be a number"),
        ({"rope.freq_base": 1.0}, "rope.freq_base: must be a number above 1"),
        (
            {"rope.scaling.type": "dynamic"},
            "rope.scaling.type: 'dynamic' is not supported; supported: none, linear, yarn, lon",
        ),
        ({"rope.scaling.factor": float("inf")}, "rope.scaling.factor: must be a number"),
        ({"rope.scaling.factor": -2.0}, "rope.scaling.factor: must be a number"),
        ({"expert_count": np.array([0, 8])}, "llama.expert_count: must be an integer from 0"),
        ({"context_length": -1}, "llama.context_length: must be an integer from 1"),
    ],
)
def test_bad_metadata(changes, message):
    with pytest.raises(jq.GGUFError) as caught:
        Config.from_metadata(changed(changes), "model.gguf")
    assert str(caught.value).startswith("model.gguf: ") and message in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logit_scale", 0.0625),
        ("residual_scale", 0.5),
        ("embedding_scale", 12.0),
        ("attention.scale", 0.1),
        ("attention.clamp_kqv", 8.0),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("use_parallel_residual", True),
        ("attention.causal", False),
        ("attention.max_alibi_bias", 8.0),
        ("attention.output_scale", 0.5),
        ("attention.temperature_scale", 0.1),
        ("attention.temperature_length", 8192),
        ("rope.scaling.alpha", 1000.0),
        ("rope.scaling.yarn_attn_factor", 1.5),
        ("rope.scaling.yarn_ext_factor", 0.0),
        ("rope.scaling.yarn_beta_fast", 8.0),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("router_logit_softcapping", 30.0),
        ("expert_gating_func", 2),
    ],
)
def test_features_that_would_be_ignored_are_refused(key, value):
    with pytest.raises(jq.GGUFError, match=f"llama.{key}: {value} is not supported"):
        Config.from_metadata(changed({key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pooling_type", 1),
        ("tensor_data_layout", "Meta AI original pth"),
        ("rope.scaling.yarn_beta_fast", 32.0),
        ("rope.scaling.yarn_ext_factor", 1.0),
        ("attention.temperature_scale", 0.0),
        ("expert_gating_func", 3),
        ("full_attention_interval", 4),  # belongs to other architectures
    ],
)
def test_keys_that_change_nothing(key, value):
    assert Config.from_metadata(changed({key: value})) == Config.from_metadata(LLAMA)


@pytest.mark.parametrize("key", ["attention.indexer.top_k", "swiglu_clamp_exp", "kda.head_dim"])
def test_features_of_other_architectures_are_refused(key):
    with pytest.raises(jq.GGUFError, match=f"m.gguf: llama.{key}: 1 is not supported"):
        Config.from_metadata(changed({key: 1}), "m.gguf")
    with pytest.raises(jq.GGUFError, match=f"llama.{key}: .* is not supported"):
        Config.from_metadata(changed({key: np.array([0, 1])}))
    assert Config.from_metadata(changed({key: 0})) == Config.from_metadata(LLAMA)
    assert Config.from_metadata({**LLAMA, f"other.{key}": 1, f"general.{key}": 1})


def test_unknown_keys():
    metadata = changed({"foo": 3, "pooling_type": 1, "kda.head_dim": 0}) | {"other.foo": 3}
    assert Config.from_metadata(metadata) == Config.from_metadata(LLAMA)
    assert metadata_keys.unknown(metadata, "llama") == ["llama.foo"]


def test_the_magnitude_that_converters_write():
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}
    key, want = "rope.scaling.yarn_attn_factor", Config.from_metadata(changed(scaling))
    for value in (1.0, np.float32(1.2079441)):
        assert Config.from_metadata(changed({**scaling, key: value})) == want
    with pytest.raises(jq.GGUFError, match="attn_factor: 1.3 is not supported, expected 1 or 1.20"):
        Config.from_metadata(changed({**scaling, key: 1.3}))


EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96}


def test_normalized_weights():
    """Architectures have defaults; the key may say otherwise."""
    for name, default in (("qwen2moe", False), ("qwen3moe", True), ("llama", True)):
        assert Config.from_metadata(of(name, **EXPERTS)).experts.normalize == default
        other = Config.from_metadata(of(name, **EXPERTS, expert_weights_norm=not default))
        assert other.experts.normalize != default
        assert Config.from_metadata(other.to_metadata()) == other


def test_scores_of_groups():
    groups = EXPERTS | {"expert_group_count": 2, "expert_group_used_count": 1}
    metadata = of("qwen3moe", **groups)
    assert Config.from_metadata(metadata).experts.group_best == 2
    config = Config.from_metadata(metadata | {GROUP_BEST: 1})
    assert config.experts.group_best == 1 and config.to_metadata()[GROUP_BEST] == 1
    assert Config.from_metadata(config.to_metadata()) == config
    with pytest.raises(jq.GGUFError, match=f"{GROUP_BEST}: must be an integer from 1 to 2, not 3"):
        Config.from_metadata(metadata | {GROUP_BEST: 3})


def test_routings_that_architectures_fix():
    experts = EXPERTS
    for name, key, value in (
        ("qwen2moe", "expert_gating_func", 3),
        ("qwen3moe", "expert_gating_func", 2),
    ):
        with pytest.raises(jq.GGUFError, match=f"{name}.{key}: {value} is not supported"):
            Config.from_metadata(of(name, **experts, **{key: value}))


def of(architecture, **changes):
    """Metadata of an architecture; double underscores in names of changes stand for dots."""
    metadata = {key.replace("llama", architecture): value for key, value in LLAMA.items()}
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return {
        **metadata,
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in changes.items()},
    }


WINDOW = {"attention__sliding_window": 16}
NO_WINDOW = {"attention__sliding_window": 0}
PATTERN = "attention__sliding_window_pattern"


@pytest.mark.parametrize(
    ("architecture", "keys", "windows"),
    [
        ("gemma2", {}, [4096, None] * 6),
        ("gemma2", WINDOW, [16, None] * 6),
        ("gemma2", NO_WINDOW, [None] * 12),
        ("gemma3", {}, [None] * 12),
        ("gemma3", WINDOW, [16, 16, 16, 16, 16, None] * 2),
        ("gemma3", WINDOW | {PATTERN: 4}, [16, 16, 16, None] * 3),
        ("gemma3", WINDOW | {PATTERN: 0}, [16] * 12),
        ("gemma3", WINDOW | {PATTERN: 1}, [None] * 12),
        ("gemma3", WINDOW | {PATTERN: np.array([True, False, False] * 4)}, [16, None, None] * 4),
        ("qwen2", WINDOW | {PATTERN: np.array([True, False, False] * 4)}, [16, None, None] * 4),
        ("qwen2", WINDOW | {PATTERN: np.zeros(12, bool)}, [None] * 12),
        ("qwen2", {PATTERN: np.ones(12, bool)}, [None] * 12),
        ("llama", WINDOW | {PATTERN: np.ones(12, bool)}, [16] * 12),
        ("phi3", WINDOW, [None] * 12),
        ("phi3", WINDOW | {PATTERN: np.ones(12, bool)}, [16] * 12),
    ],
)
def test_windows(architecture, keys, windows):
    """Checks windows, and that exactly Gemma 3's windowed layers use the local rope."""
    config = Config.from_metadata(of(architecture, block_count=12, **keys))
    assert [config.window_of(layer) for layer in range(12)] == windows
    local = [architecture == "gemma3" and window is not None for window in windows]
    assert [config.rope_of(layer) for layer in range(12)] == local
    assert Config.from_metadata(config.to_metadata()) == config
    assert config.context_length == 2048


@pytest.mark.parametrize("architecture", ["cohere2", "gemma2", "gpt-oss"])
def test_no_windows_where_architectures_have_them(architecture):
    """Saved files have the context as window: llama.cpp gives NaNs for 0, and needs windows."""
    keys = {
        "cohere2": {"logit_scale": 0.5, "attention__layer_norm_epsilon": 1e-5},
        "gemma2": {},
        "gpt-oss": {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8},
    }[architecture]
    config = Config.from_metadata(of(architecture, block_count=12, **keys, **NO_WINDOW))
    assert config.windows == ()
    assert any(config.rotated_by_layer) == (architecture != "cohere2")
    metadata = config.to_metadata()
    assert metadata[f"{architecture}.attention.sliding_window"] == config.context_length
    assert f"{architecture}.attention.sliding_window_pattern" not in metadata
    factor = metadata.get(f"{architecture}.rope.scaling.factor", 1.0)
    assert factor == (2.0**100 if architecture == "cohere2" else 1.0)
    assert Config.from_metadata(metadata) == config


def test_a_period_in_a_file_whose_architecture_has_no_windows():
    """Ignores it as llama.cpp does, so that the window limits the context."""
    config = Config.from_metadata(of("qwen2", block_count=12, **WINDOW, **{PATTERN: 4}))
    assert (config.windows, config.context_length) == ((), 16)


ROTATED = "rope__rotated_layers"


@pytest.mark.parametrize(
    ("architecture", "keys", "rotated"),
    [
        ("llama", {}, [True] * 4),
        ("llama", {ROTATED: np.array([True, False] * 2)}, [True, False] * 2),
        ("smollm3", {}, [True, True, True, False]),
        ("smollm3", {ROTATED: np.array([False, True] * 2)}, [False, True] * 2),
        ("cohere2", WINDOW, [True, True, True, False]),
        ("cohere2", WINDOW | {PATTERN: np.arange(4) == 1}, [False, True, False, False]),
        ("cohere2", WINDOW | {ROTATED: np.ones(4, bool)}, [True] * 4),
    ],
)
def test_layers_without_rope(architecture, keys, rotated):
    others = {"logit_scale": 1.0, "attention__layer_norm_epsilon": 1e-5}  # of cohere2
    config = Config.from_metadata(of(architecture, block_count=4, **others, **keys))
    factors = [config.ropes[config.rope_of(layer)].factor for layer in range(4)]
    assert np.isfinite(factors).tolist() == rotated
    assert Config.from_metadata(config.to_metadata()) == config


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones(3, bool), "rotated_layers: has 3 entries, expected one for each of 4 layers"),
        (np.ones(4, int), "rotated_layers: must be an array of booleans"),
        (True, "rotated_layers: must be an array of booleans"),
    ],
)
def test_patterns_of_rope_that_are_refused(value, message):
    with pytest.raises(jq.GGUFError, match=message):
        Config.from_metadata(of("smollm3", block_count=4, **{ROTATED: value}))


def test_a_pattern_that_says_what_the_architecture_says():
    said = Config.from_metadata(of("gemma3", block_count=12, **WINDOW, **{PATTERN: 6}))
    assert said == Config.from_metadata(of("gemma3", block_count=12, **WINDOW))


@pytest.mark.parametrize(
    ("architecture", "keys", "caps"),
    [
        ("gemma", {}, (None, None)),
        ("gemma2", {}, (50.0, 30.0)),
        ("gemma2", {"attn_logit_softcapping": 5, "final_logit_softcapping": 0.0}, (5.0, None)),
        ("gemma2", {"attn_logit_softcapping": 1e6, "final_logit_softcapping": 9}, (None, 9.0)),
        ("gemma3", {}, (None, None)),
        ("gemma3", {"final_logit_softcapping": 20.0}, (None, 20.0)),
    ],
)
def test_soft_caps(architecture, keys, caps):
    config = Config.from_metadata(of(architecture, **keys))
    assert (config.attention_soft_cap, config.final_soft_cap) == caps
    assert Config.from_metadata(config.to_metadata()) == config


@pytest.mark.parametrize(
    ("architecture", "layers", "scale"),
    [
        ("gemma", 46, None),
        ("gemma2", 42, 256**-0.5),
        ("gemma2", 46, 144**-0.5),
        ("gemma3", 46, 256**-0.5),
        ("gemma3", 62, 144**-0.5),
    ],
)
def test_27b_models_scale_scores_by_their_width(architecture, layers, scale):
    sizes = {"embedding_length": 4608, "attention__head_count": 32, "attention__key_length": 256}
    config = Config.from_metadata(of(architecture, block_count=layers, **sizes))
    assert config.attention_scale == scale and config.embedding_scale == 4608**0.5
    with pytest.raises(jq.GGUFError, match="attention.scale: 0.25 is not supported"):
        Config.from_metadata(of(architecture, **sizes, attention__scale=0.25))


def test_linear_scaling_is_of_global_layers():
    keys = {"rope__scaling__factor": 8.0, "rope__freq_base": 1e6} | WINDOW
    config = Config.from_metadata(of("gemma3", **keys))
    assert config.ropes == (Rope(1e6, 64, 8.0), Rope(1e4, 64, divided=False))
    local = Config.from_metadata(of("gemma3", **keys, rope__freq_base_swa=5e4)).ropes[1]
    assert local == Rope(5e4, 64, divided=False)


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("gemma", {"attn_logit_softcapping": 50.0}, "softcapping: 50.0 is not supported"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "softcapping: 50.0 is not supported"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "softcapping: must be a number above 0"),
        ("gemma2", {"final_logit_softcapping": "x"}, "softcapping: must be a number above 0"),
        ("gemma2", {"rope__freq_base_swa": 1e6}, "freq_base_swa: is not supported, expected rope"),
        ("gemma3", {PATTERN: np.array([True])}, "pattern: has 1 entries, expected one for each of"),
        ("gemma3", {PATTERN: -1}, "pattern: must be an integer from 0"),
        ("gemma3", {PATTERN: np.array([1, 0])}, "pattern: must be an integer from 0"),
    ],
)
def test_windows_and_caps_that_are_refused(architecture, keys, message):
    with pytest.raises(jq.GGUFError, match=message):
        Config.from_metadata(of(architecture, **keys))


def test_sections_of_positions_in_images():
    """Qwen's sections of 64 pairs; a text's positions are equal in all sections."""
    metadata = Config.from_metadata(of("qwen2vl", attention__key_length=128)).to_metadata()
    assert metadata["qwen2vl.rope.dimension_sections"].tolist() == [16, 24, 24, 0]


def test_rotated_dimensions_lie_in_the_head():
    with pytest.raises(ValueError, match="rope_dim=96 must be at most head_dim=64"):
        Config("llama", 8, 64, 128, 128, 1, 2, 2, 64, 1e-5, rope_dim=96)


@pytest.mark.parametrize("architecture", [None, "mamba", 7])
def test_unknown_architecture(architecture):
    with pytest.raises(ValueError, match="^architecture=.*supported: bert, cohere2, "):
        Config(architecture, 8, 64, 128, 128, 1, 2, 2, 64, 1e-5)
    with pytest.raises(
        jq.GGUFError,
        match=f"general.architecture.*supported: {', '.join(ARCHITECTURES)}",
    ):
        Config.from_metadata({"general.architecture": architecture})
