"""Checkpoints of hybrids, Gemma 4 and latent attention, with golden weights.

tests/data/checkpoints/transformers_hybrids.json has config.json and the tensors' names and shapes
from transformers. With the weights of these folders transformers computes the golden logits, too.
"""

from __future__ import annotations

import copy
import functools
import json

import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import needs_native
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.config import Config
from jax_q4k.models.files.checkpoints import config_json
from jax_q4k.models.support import json_fields

from ... import checkpoints, hybrid_checkpoints
from ...golden_files import model, path, reference

pytestmark = needs_native

DATA = GOLDEN.parent / "checkpoints" / "transformers_hybrids.json"
CASES = json.loads(DATA.read_text())
#: Config fields in golden files that no layer uses.
UNUSED = ("intermediate_size",)
SKIPPED = "ignore:.* tensors are skipped, which text generation does not use"


@pytest.fixture(autouse=True)
def exact():
    with jq.implementation("native", activations="f32"):
        yield


@functools.cache
def in_the_checkpoint(name: str) -> dict[str, np.ndarray]:
    """The tensors of a case; those outside of the decoder are zero."""
    shapes = CASES[name]["tensors"]
    inner = "language_model." if any("language_model" in key for key in shapes) else ""
    weights = hybrid_checkpoints.tensors(CASES[name]["golden"])
    tensors = {
        key if key.startswith("lm_head") else key.replace("model.", f"model.{inner}", 1): array
        for key, array in weights.items()
    }
    beside = ("visual", "vision", "audio")
    others = {key for key in shapes if key not in tensors and any(b in key for b in beside)}
    return tensors | {key: np.zeros(shapes[key], np.float32) for key in others}


def folder(tmp_path, name, changes=None, tensors=None):
    """A checkpoint's folder; `changes` apply to the decoder's config, and None removes a key."""
    described = changed(name, changes or {})
    return checkpoints.write(tmp_path / "model", described, tensors or in_the_checkpoint(name))


def changed(name, changes, config="config"):
    described = copy.deepcopy(CASES[name][config])
    decoder = described.get("text_config", described)
    for key, value in changes.items():
        inner, _, last = key.rpartition(".")
        into = decoder[inner] if inner else decoder
        into[last] = value
        if value is None:
            del into[last]
    return described


def describe(config):
    return config_json.describe(json_fields.JSONFields(config, "config.json"))


def check_config(got: Config, golden: str) -> None:
    want = model(golden).config
    if not want.kind.mlp:
        got = Config(**{**vars_of(got), "intermediate_size": want.intermediate_size})
    assert got == want


def vars_of(config: Config) -> dict:
    return {field: getattr(config, field) for field in config.__dataclass_fields__}


@pytest.mark.slow("converts and compiles models", quick=["qwen35moe-vl"])
@pytest.mark.filterwarnings(SKIPPED)
@pytest.mark.parametrize("name", CASES)
def test_the_golden_logits(name, tmp_path):
    """Checks logits of the checkpoint and of its saved file, and the tensors' names and shapes."""
    tensors, golden = in_the_checkpoint(name), CASES[name]["golden"]
    shapes = {key: list(array.shape) for key, array in tensors.items()}
    assert shapes == CASES[name]["tensors"]
    got, want = models.from_pretrained(folder(tmp_path, name)), reference(golden)
    check_config(got.config, golden)
    held = models.named_tensors(model(golden))
    found = models.named_tensors(got)
    assert found.keys() == held.keys()
    for key, tensor in held.items():
        expected = checkpoints.decoded(tensor)
        np.testing.assert_allclose(found[key], expected, rtol=1e-6, atol=2e-7, err_msg=key)
    logits = got.logits(want.tokens[None])
    assert nmse(logits[0], want.logits) <= 1e-8
    models.save_gguf(got, tmp_path / "model.gguf")
    again = models.from_gguf(tmp_path / "model.gguf")
    assert again.config == got.config
    np.testing.assert_array_equal(again.logits(want.tokens[None]), logits)


@pytest.mark.parametrize("name", [name for name in CASES if "config_of_4" in CASES[name]])
def test_config_json_of_transformers_4(name):
    early = describe(CASES[name]["config_of_4"])
    assert early.metadata.keys() == describe(CASES[name]["config"]).metadata.keys()
    check_config(early.config, CASES[name]["golden"])


def refused(folder, message: str) -> None:
    with pytest.raises(jq.CheckpointError, match=message):
        models.CheckpointSource(folder)


def test_keys_that_may_be_left_out():
    """Defaults of transformers: layer intervals, rope sections, head counts of all layers."""
    names = ("layer_types", "rope_parameters.mrope_section", "linear_num_key_heads")
    names += ("linear_num_value_heads",)
    config = changed(
        "qwen35", dict.fromkeys(names) | {"full_attention_interval": 2, "head_dim": 256}
    )
    found = describe(config)
    assert found.config.mixers == ("delta", "attention", "delta", "attention", "delta")
    assert found.config.delta is not None and found.config.delta[:2] == (16, 32)
    assert found.metadata["qwen35.rope.dimension_sections"].tolist() == [11, 11, 10, 0]
    config = changed("lfm2", {"layer_types": None, "full_attn_idxs": [0, 3]})
    assert describe(config).config.mixers == (
        "attention",
        "convolution",
        "convolution",
        "attention",
    )
    assert set(describe(changed("lfm2", {"layer_types": None})).config.mixers) == {"attention"}
    config = changed("deepseek2", {"q_lora_rank": None, "num_key_value_heads": None})
    assert describe(config).config.latent.query_rank == 0


def test_sizes_before_they_are_adjusted():
    adjusted = {"block_auto_adjust_ff_dim": True, "block_ff_dim": 1000, "block_multiple_of": 32}
    sizes = {None: 672, 1.5: 1024}  # for 666 and 999
    for multiplier, size in sizes.items():
        changes = adjusted | {"block_ffn_dim_multiplier": multiplier}
        assert describe(changed("lfm2", changes)).config.intermediate_size == size


def test_the_output_layer_that_is_the_embedding():
    assert describe(changed("lfm2", {"tie_word_embeddings": None})).tied
    assert not describe(changed("lfm2", {"tie_embedding": False})).tied
    assert describe(changed("lfm2", {"tie_embedding": True})).tied
    assert describe(changed("gemma4", {"tie_word_embeddings": None})).tied
    assert not describe(changed("qwen35", {"tie_word_embeddings": None})).tied


def test_heads_of_gemma_4_as_its_first_files_say_them():
    """Two keys replace per_layer_config; with shared projections only one of them applies."""
    earlier = {"per_layer_config": None, "global_head_dim": 128, "num_global_key_value_heads": 1}
    for name in ("gemma4", "gemma4-moe"):
        assert describe(changed(name, earlier)).config == describe(changed(name, {})).config
    own = describe(changed("gemma4", earlier | {"attention_k_eq_v": False})).config
    assert (own.kv_heads, own.head_dim) == (None, 128)
    without = describe(changed("gemma4", {"per_layer_config": None})).config
    assert (without.head_dim, without.local_head_dim) == (512, 64)


def test_features_that_gemma_4_leaves_out_are_off():
    config = describe(changed("gemma4-e", {"final_logit_softcapping": None})).config
    assert config.final_soft_cap is None
    config = describe(changed("gemma4", {"use_bidirectional_attention": "vision"})).config
    assert config == describe(changed("gemma4", {})).config
    rope = describe(changed("gemma4", {"rope_parameters": None}))
    assert rope.config.rope_theta == 1e6 and rope.config.local_rope_theta == 1e4
    (divisors,) = rope.rope_divisors.values()
    assert divisors.tolist() == [1.0] * 16 + [float(np.float32(1e30))] * 48
    scaled = describe(
        changed(
            "gemma4",
            {
                "rope_parameters.full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e6,
                    "factor": 8.0,
                }
            },
        )
    )
    assert scaled.config.rope_factor == 8.0
    assert scaled.rope_divisors["rope_freqs.weight"].tolist() == [1.0] * 64


def yarn_of(**changes):
    inner = CASES["deepseek2"]["config"]["rope_parameters"] | changes
    given = {key: value for key, value in inner.items() if value is not None}
    return describe(changed("deepseek2", {"rope_parameters": given})).config


def test_yarn_of_latent_attention():
    """Follows transformers: scores scale with mscale_all_dim, magnitudes with the ratio of both.

    Rotated queries have the square of the magnitude, and the rope in the file has none.
    """
    growth = 0.1 * np.log(8)
    base = 96**-0.5
    assert yarn_of().attention_scale == pytest.approx(base * (1 + 0.707 * growth) ** 2)
    assert (yarn_of().rope_magnitude, yarn_of().checkpoint_query_factor) == (1.0, 1.0)
    for changes, magnitude in (
        ({"mscale": 1.0}, (1 + growth) / (1 + 0.707 * growth)),
        ({"mscale": None}, 1 + growth),
    ):
        other = yarn_of(**changes)
        assert other.checkpoint_query_factor == pytest.approx(magnitude**2)
        assert other.attention_scale == yarn_of().attention_scale
        assert other.rope_magnitude == 1.0
    neither = yarn_of(mscale=None, mscale_all_dim=None)
    assert neither.attention_scale == pytest.approx(base)
    # llama.cpp multiplies scores by (1 + growth)^2 if the file has no multiplier: the key undoes it
    assert neither.rope_magnitude == pytest.approx(1 / (1 + growth))
    assert neither.checkpoint_query_factor == pytest.approx((1 + growth) ** 2)


def test_dense_layers_of_glm():
    name = "deepseek2-noyarn"
    assert describe(changed(name, {"mlp_layer_types": None})).config.experts.dense_layers == 1
    types = {"mlp_layer_types": ["dense", "dense"]}
    assert describe(changed(name, types)).config.experts.dense_layers == 2
    types = {"mlp_layer_types": None, "first_k_dense_replace": 0}
    assert describe(changed(name, types)).config.experts.dense_layers == 0


FULL, LINEAR, WINDOWED = "full_attention", "linear_attention", "sliding_attention"
REFUSED = [
    ("qwen35", {"layer_types": [LINEAR, WINDOWED] * 2}, "layer_types: 'sliding_attention' is not"),
    ("qwen35", {"layer_types": [LINEAR, FULL]}, "layer_types: has 2 entries, expected 5"),
    ("qwen35", {"linear_value_head_dim": 0}, "linear_value_head_dim: must be an integer from 1"),
    ("qwen35", {"linear_num_value_heads": 5}, "linear_num_value_heads: 5 must be a multiple"),
    ("qwen35", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim: must be an integer from 1"),
    ("qwen35", {"linear_key_head_dim": "64"}, "linear_key_head_dim: must be an integer"),
    ("qwen35", {"attn_output_gate": False}, "attn_output_gate: is False"),
    ("qwen35", {"hidden_act": "gelu"}, "hidden_act: is 'gelu'"),
    ("qwen35", {"intermediate_size": None}, "intermediate_size: is missing"),
    ("qwen35", {"rope_parameters.mrope_section": [3, 3]}, "mrope_section: must be 3 counts"),
    ("qwen35", {"rope_parameters.mrope_section": [3, 3, -1]}, "mrope_section: must be 3 counts"),
    ("qwen35", {"rope_parameters.partial_rotary_factor": 1.5}, "partial_rotary_factor: must be"),
    ("qwen35-long", {"layer_types": ["conv", FULL]}, "text_config.layer_types: 'conv' is not"),
    ("qwen35moe", {"num_experts": None}, "num_experts: is missing"),
    ("qwen35moe", {"mlp_only_layers": [0]}, "mlp_only_layers: is "),
    ("qwen3next", {"decoder_sparse_step": 2}, "decoder_sparse_step: is 2"),
    ("qwen3next", {"shared_expert_intermediate_size": None}, "intermediate_size: is missing"),
    (
        "qwen3next",
        {"quantization_config": {"quant_method": "hqq"}},
        "quantization_config: is 'hqq'",
    ),
    ("gemma4", {"layer_types": [WINDOWED, LINEAR, FULL]}, "layer_types: 'linear_attention' is not"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: is 'all'"),
    (
        "gemma4",
        {"per_layer_config": {"0": {"head_dim": 32}}},
        r"per_layer_config.0: must be one of",
    ),
    (
        "gemma4",
        {"per_layer_config": {"2": {"eps": 1}}},
        r"per_layer_config.2.eps: is not supported",
    ),
    ("gemma4-e", {"per_layer_config.6": {"head_dim": 256}}, "per_layer_config.6: gives .256, 2."),
    ("gemma4-e", {"vocab_size_per_layer_input": 271}, "vocab_size_per_layer_input: is 271"),
    (
        "gemma4-e",
        {"num_kv_shared_layers": 7},
        "num_kv_shared_layers: must be an integer from 0 to 6",
    ),
    ("gemma4-e", {"num_kv_shared_layers": 4}, "num_kv_shared_layers: 4 leaves a layer without"),
    ("gemma4-e", {"hidden_activation": "silu"}, "hidden_activation: is 'silu'"),
    ("gemma4-moe", {"top_k_experts": None}, "top_k_experts: is missing"),
    (
        "gemma4",
        {"rope_parameters.sliding_attention": {"rope_type": "linear", "factor": 2.0}},
        "rope_parameters.sliding_attention.rope_type: 'linear' is not supported",
    ),
    (
        "gemma4",
        {
            "rope_parameters.full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 2,
            }
        },
        "rope_parameters.full_attention.partial_rotary_factor: must be above 0",
    ),
    ("deepseek2", {"rope_interleave": 1}, "rope_interleave: must be a boolean"),
    ("deepseek2", {"scoring_func": "softmax"}, "scoring_func: is 'softmax'"),
    ("deepseek2", {"topk_method": "greedy"}, "topk_method: is 'greedy'"),
    ("deepseek2", {"moe_layer_freq": 2}, "moe_layer_freq: is 2"),
    ("deepseek2", {"num_key_value_heads": 2}, "num_key_value_heads: is 2"),
    ("deepseek2", {"kv_lora_rank": None}, "kv_lora_rank: is missing"),
    ("deepseek2", {"v_head_dim": 0}, "v_head_dim: must be an integer from 1"),
    ("deepseek2", {"n_group": 3}, "n_group: 3 must divide"),
    ("deepseek2-lite", {"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc' is not supported"),
    (
        "deepseek2-lite",
        {"topk_method": "group_limited_greedy", "n_group": None},
        "n_group: is missing",
    ),
    (
        "deepseek2-noyarn",
        {"mlp_layer_types": ["sparse", "dense"]},
        "mlp_layer_types: must list dense",
    ),
    ("lfm2", {"conv_bias": 1}, "conv_bias: must be a boolean"),
    ("lfm2", {"conv_L_cache": None}, "conv_L_cache: is missing"),
    ("lfm2", {"conv_L_cache": 65}, "conv_L_cache: must be an integer from 1 to 64"),
    ("lfm2", {"layer_types": ["conv"] * 4}, "num_key_value_heads: must not be 0 in every layer"),
    ("lfm2", {"layer_types": ["conv", FULL]}, "layer_types: has 2 entries, expected 4"),
    ("lfm2", {"layer_types": ["conv", LINEAR] * 2}, "layer_types: 'linear_attention' is not"),
    ("lfm2", {"norm_eps": None}, "norm_eps: is missing"),
    ("lfm2", {"num_key_value_heads": 1 << 40}, "num_key_value_heads: must be an integer from 1"),
    ("lfm2", {"intermediate_size": 1 << 40}, "intermediate_size: must be an integer from 1"),
    ("gemma4", {"num_key_value_heads": 1 << 40}, "num_key_value_heads: must be an integer from 1"),
    (
        "gemma4",
        {"per_layer_config.2": {"num_key_value_heads": 0}},
        "per_layer_config.2.num_key_value_heads: must be an integer from 1",
    ),
    ("gemma4-e", {"intermediate_size": 1 << 40}, "intermediate_size: must be an integer from 1"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_configs_that_are_refused(name, changes, message):
    with pytest.raises(jq.CheckpointError, match=message):
        describe(changed(name, changes))


@pytest.mark.slow("converts and compiles models")
def test_layers_and_tensors_that_predict_further_tokens(tmp_path):
    further = {"mtp.fc.weight": np.zeros((2, 4), np.float32)}
    further["mtp.layers.0.mlp.gate_proj.weight"] = further["mtp.fc.weight"]
    for name in ("qwen35", "qwen35moe", "qwen3next"):
        tensors = in_the_checkpoint(name) | further
        with pytest.warns(UserWarning, match="2 tensors are skipped, .*: further tokens"):
            models.CheckpointSource(folder(tmp_path, name, tensors=tensors))
    for name in ("deepseek2", "deepseek2-noyarn"):
        layers = CASES[name]["config"]["num_hidden_layers"]
        tensors = in_the_checkpoint(name) | {
            f"model.layers.{layers}.eh_proj.weight": np.zeros((2, 4))
        }
        changes = {"num_nextn_predict_layers": 1}
        with pytest.warns(UserWarning, match="1 tensors are skipped, .*: further tokens"):
            models.CheckpointSource(folder(tmp_path, name, changes, tensors))
        changes = {"num_nextn_predict_layers": 0}
        refused(folder(tmp_path, name, changes, tensors), "eh_proj.weight': is not part of")


def test_keys_of_layers_that_take_those_of_others(tmp_path):
    """Released Gemma 4 checkpoints contain them; nothing reads them."""
    tensors = dict(in_the_checkpoint("gemma4-e"))
    for part in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.5.self_attn.{part}.weight"] = np.zeros((2, 2), np.float32)
    with pytest.warns(UserWarning, match="3 tensors are skipped, .*: keys and values of layers"):
        models.CheckpointSource(folder(tmp_path, "gemma4-e", tensors=tensors))
    tensors["model.layers.5.self_attn.v_norm.weight"] = np.zeros(64, np.float32)
    with pytest.warns(UserWarning, match="3 tensors"):
        refused(folder(tmp_path, "gemma4-e", tensors=tensors), "v_norm.weight': is not part of")


def stacked(tensors: dict, layers: int, experts: int) -> dict:
    """Stacks the experts' matrices in two tensors per layer, as Qwen 3.5 is released."""
    found = dict(tensors)
    for layer in range(layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            np.stack([found.pop(f"{prefix}{i}.{part}_proj.weight") for i in range(experts)])
            for part in ("gate", "up", "down")
        )
        found[f"{prefix}gate_up_proj"] = np.concatenate([gate, up], axis=1)
        found[f"{prefix}down_proj"] = down
    return found


@pytest.mark.parametrize("name", ["qwen35moe", "qwen3next"])
def test_experts_in_stacks(name, tmp_path):
    one_by_one = in_the_checkpoint(name)
    tensors = stacked(one_by_one, 3, 8)
    with models.CheckpointSource(folder(tmp_path, name, tensors=tensors)) as source:
        for part in ("gate", "up", "down"):
            want = [
                one_by_one[f"model.layers.1.mlp.experts.{i}.{part}_proj.weight"] for i in range(8)
            ]
            np.testing.assert_array_equal(source.read(f"blk.1.ffn_{part}_exps.weight"), want)
    key = "model.layers.1.mlp.experts.gate_up_proj"
    cut = tensors | {key: tensors[key][:, :64]}
    refused(folder(tmp_path, name, tensors=cut), rf"{key}': has shape \(8, 64, 256\)")
    without = {k: tensor for k, tensor in tensors.items() if k != key}
    refused(folder(tmp_path, name, tensors=without), "experts.0.gate_proj.weight': is missing")


DAMAGED = [
    ("qwen35", "layers.0.linear_attn.conv1d.weight", lambda a: a[:, 0], r"expected \(512, 1, 4\)"),
    ("qwen35", "layers.0.linear_attn.A_log", lambda a: a[:2], r"has shape \(2,\), expected \(4,\)"),
    ("qwen35", "layers.0.linear_attn.in_proj_qkv.weight", lambda a: a[:256], "has shape"),
    ("qwen3next", "layers.0.linear_attn.in_proj_qkvz.weight", lambda a: a[:512], r"\(768, 256\)"),
    ("qwen3next", "layers.0.linear_attn.in_proj_ba.weight", lambda a: None, "is missing"),
    ("gemma4", "layers.1.self_attn.v_proj.weight", lambda a: None, "is missing"),
    ("gemma4", "layers.1.layer_scalar", lambda a: None, "is missing"),
    ("gemma4-moe", "layers.0.router.per_expert_scale", lambda a: a[:3], r"expected \(6,\)"),
    ("gemma4-moe", "layers.0.router.scale", lambda a: None, "is missing"),
    ("gemma4-moe", "layers.0.experts.gate_up_proj", lambda a: a[:, :64], "has shape"),
    ("deepseek2", "layers.0.self_attn.kv_b_proj.weight", lambda a: a[:256], r"\(512, 128\)"),
    ("deepseek2", "layers.1.mlp.gate.e_score_correction_bias", lambda a: None, "is missing"),
    ("lfm2", "layers.0.conv.conv.weight", lambda a: a[:, 0], r"expected \(256, 1, 3\)"),
    ("lfm2moe", "layers.1.feed_forward.expert_bias", lambda a: None, "is missing"),
]


@pytest.mark.parametrize(("name", "key", "damage", "message"), DAMAGED)
def test_damaged_checkpoints(name, key, damage, message, tmp_path):
    tensors = dict(in_the_checkpoint(name))
    damaged = damage(tensors.pop(f"model.{key}"))
    if damaged is not None:
        tensors[f"model.{key}"] = np.ascontiguousarray(damaged)
    refused(folder(tmp_path, name, tensors=tensors), f"{key}': .*{message}")


def test_values_that_keys_take_the_place_of(tmp_path):
    tensors = dict(in_the_checkpoint("gemma4"))
    name = "model.layers.2.self_attn.v_proj.weight"
    tensors[name] = tensors["model.layers.2.self_attn.k_proj.weight"]
    refused(folder(tmp_path, "gemma4", tensors=tensors), f"{name}': is not part of a gemma4")


@pytest.mark.parametrize(
    ("value", "message"),
    [(np.nan, "element 1 is NaN"), (1e3, "logarithms of numbers that are too")],
)
def test_decays_that_are_not_finite(value, message, tmp_path):
    tensors, key = dict(in_the_checkpoint("qwen35")), "model.layers.0.linear_attn.A_log"
    tensors[key] = tensors[key].copy()
    tensors[key][1] = value
    with models.CheckpointSource(folder(tmp_path, "qwen35", tensors=tensors)) as source:
        with pytest.raises(jq.CheckpointError, match=f"{key}': .*{message}"):
            source.read("blk.0.ssm_a")


@pytest.mark.filterwarnings(SKIPPED)
@pytest.mark.parametrize("name", ["qwen35", "qwen3next", "gemma4-moe", "deepseek2", "lfm2moe"])
def test_a_folder_is_quantized_like_its_file(name, tmp_path):
    """Quantizing the folder or the golden file gives the same bytes.

    Both hold the same decoded weights.
    """
    models.quantize_file(folder(tmp_path, name), tmp_path / "folder.gguf", "Q8_0")
    models.quantize_file(path(CASES[name]["golden"]), tmp_path / "file.gguf", "Q8_0")
    got, want = (jq.gguf.read(tmp_path / f"{which}.gguf").tensors for which in ("folder", "file"))
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        if jq.is_quantized(tensor):
            assert got[key].to_gguf_bytes() == tensor.to_gguf_bytes(), key
        else:
            np.testing.assert_allclose(got[key], tensor, rtol=1e-6, atol=2e-7)


@pytest.mark.filterwarnings(SKIPPED)
@pytest.mark.parametrize("name", ["qwen35", "qwen3next", "deepseek2-noyarn"])
def test_half_precision(name, tmp_path):
    """Weights keep their dtype; norms, decays and convolutions become float32."""
    import jax.numpy as jnp

    half = {k: np.asarray(jnp.asarray(a, jnp.bfloat16)) for k, a in in_the_checkpoint(name).items()}
    got = models.named_tensors(models.from_pretrained(folder(tmp_path, name, tensors=half)))
    exact = ("norm.weight", "ssm_a", "ssm_dt.bias", "ssm_conv1d.weight", "ffn_gate_inp.weight")
    exact += ("exp_probs_b.bias", "ffn_gate_inp_shexp.weight")
    for key, tensor in got.items():
        assert tensor.dtype == (jnp.float32 if key.endswith(exact) else jnp.bfloat16), key
