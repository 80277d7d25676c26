"""Invalid files of further architectures: they load, or raise a typed error naming the fault."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from support.gguf_bytes import damage, parse
from support.implementations import needs_native

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.architectures.tensor_tables import OPTIONAL_BIASES
from jax_q4k.models.config.tensors import expected_tensors, unused_tensors
from jax_q4k.models.files.fused import parts_of
from jax_q4k.models.files.gguf import describe, used_tensors
from jax_q4k.models.network.build import build

from ..golden_files import FAMILIES, WITH_EXPERTS, model, path, reference

#: Files with the tensors of another file of the same architecture.
ALIKE = (
    "deepseek2-noyarn",
    "gpt-oss-mxfp4",
    "granite-nope",
    "phi3-short",
    "qwen35-mtp",
)


def check(metadata, tensors):
    """Runs the checks that loading does before it reads tensors."""
    header = dataclasses.replace(
        jq.gguf.read_header(path("phi3")), metadata=metadata, tensors=tensors
    )
    return describe(metadata, used_tensors(header, "bad.gguf"), "bad.gguf")


def header(name):
    """Metadata and used tensors of a golden file."""
    read = jq.gguf.read_header(path(name))
    unused = unused_tensors(read.metadata, read.tensors)
    return dict(read.metadata), {n: t for n, t in read.tensors.items() if n not in unused}


def of_different_layers(tensors):
    """Drops tensors of layers with the same names and shapes as a preceding layer."""
    layers, found = {}, {}
    for tensor, info in tensors.items():
        layer, _, rest = tensor.removeprefix("blk.").partition(".")
        of_layer = tensor.startswith("blk.")
        (layers.setdefault(layer, {}) if of_layer else found)[rest if of_layer else tensor] = info
    shapes = []
    for layer, infos in layers.items():
        kind = {rest: info.shape for rest, info in infos.items()}
        if kind not in shapes:
            shapes.append(kind)
            found |= {f"blk.{layer}.{rest}": info for rest, info in infos.items()}
    return found


@pytest.mark.slow(
    "checks a header for each tensor", quick=[name for name in FAMILIES if name not in ALIKE]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_missing_and_wrongly_shaped_tensors(name):
    metadata, tensors = header(name)
    config, _ = check(metadata, tensors)
    expected = expected_tensors(config)
    for tensor, info in of_different_layers(tensors).items():
        others = {other: info for other, info in tensors.items() if other != tensor}
        parts = [part for part in parts_of(config, tensor) if part in expected]
        what = expected[parts[0] if parts else tensor]
        optional = tensor.endswith(".bias") and what.entry.bias in OPTIONAL_BIASES
        optional &= what.entry.bias not in config.kind.biases
        if optional or (not what.required and not tensor.startswith("rope_factors")):
            check(metadata, others)
        else:
            rule = "is missing|is present without 'rope_factors"
            with pytest.raises(jq.GGUFError, match=f"bad.gguf: tensor .*: ({rule})"):
                check(metadata, others)
        taller = dataclasses.replace(info, shape=(info.shape[0] + 1, *info.shape[1:]))
        with pytest.raises(jq.GGUFError, match=f"tensor '({tensor}|token.*)': has shape"):
            check(metadata, others | {tensor: taller})
    with pytest.raises(jq.GGUFError, match="'blk.0.stranger.weight': is not part of a"):
        check(metadata, tensors | {"blk.0.stranger.weight": info})


NUMBERS = [
    (WITH_EXPERTS, "expert_count", 10**9, "must be an integer from"),
    (WITH_EXPERTS, "expert_count", -1, "must be an integer from"),
    (WITH_EXPERTS, "expert_count", 1, "expert_used_count: must be an integer from 1 to 1"),
    (WITH_EXPERTS, "expert_count", np.array([8, 4]), "must be an integer from"),
    (WITH_EXPERTS, "expert_used_count", 0, "must be an integer from 1"),
    (WITH_EXPERTS, "expert_used_count", 17, "must be an integer from 1 to"),
    (WITH_EXPERTS, "expert_used_count", "two", "must be an integer from 1 to"),
    (("qwen3moe", "gpt-oss"), "expert_count", 0, "must be an integer from 1"),
    (("qwen3moe", "gpt-oss"), "expert_count", None, "is missing, expected an integer"),
    (("mixtral", "granitemoe"), "expert_count", 0, "tensor 'blk.0.ffn_gate.weight': is missing"),
    (("qwen3moe",), "expert_feed_forward_length", 0, "must be an integer from 1"),
    (("qwen3moe",), "expert_feed_forward_length", 1 << 40, "must be an integer from 1"),
    (("qwen3moe",), "expert_feed_forward_length", None, "is missing"),
    (("qwen3moe",), "expert_feed_forward_length", 512, "has shape .*, expected"),
    (("qwen2moe",), "expert_shared_feed_forward_length", 0, "shexp.* is not part of"),
    (("glm4moe",), "expert_shared_count", 1 << 40, "must be an integer from 0"),
    (("glm4moe",), "leading_dense_block_count", 4, "must be an integer from 0 to 3"),
    (("glm4moe",), "leading_dense_block_count", 0, "'blk.0.ffn_gate_inp.weight': is missing"),
    (("glm4moe",), "expert_gating_func", 3, "3 is not supported; supported: 1 .softmax., 2"),
    (("glm4moe",), "expert_weights_norm", 1, "is of type int, expected bool"),
    (("glm4moe",), "expert_weights_scale", math.nan, "must be a number"),
    (("glm4moe",), "expert_group_count", 3, "3 must divide expert_count=8"),
    (("glm4moe",), "expert_group_used_count", 2, "must be an integer from 0 to 1"),
    (("granite", "cohere2", "command-r"), "logit_scale", 0.0, "must be a number above 0"),
    (("granite", "cohere2", "command-r"), "logit_scale", None, "is missing"),
    (("granite",), "residual_scale", math.inf, "must be a number above 0"),
    (("granite",), "embedding_scale", np.ones(2), "must be a number above 0"),
    (("granite",), "rope.scaling.finetuned", 0, "is of type int, expected bool"),
    (("cohere2", "starcoder2"), "attention.layer_norm_epsilon", None, "is missing"),
    (("mistral3", "gpt-oss"), "rope.scaling.factor", 1e-9, "must be a number above 1e-06"),
    (("mistral3",), "rope.scaling.yarn_beta_fast", 0.0, "must be a number above 0"),
    (("mistral3",), "rope.scaling.yarn_beta_slow", math.nan, "must be a number above 0"),
    (("mistral3",), "rope.scaling.yarn_log_multiplier", -1.0, "must be a number above"),
    (("mistral3",), "attention.temperature_scale", math.inf, "must be a number above"),
    (("olmo3",), "rope.scaling.original_context_length", 0, "must be an integer from 1"),
    (("olmo3",), "rope.scaling.type", "ntk", "'ntk' is not supported; supported: none, lin"),
    (("phi3-long",), "rope.scaling.attn_factor", -1.0, "must be a number above"),
    (("phi3-long",), "rope.dimension_count", 64, "'rope_factors_long.weight': has shape"),
    (("phi3",), "attention.head_count_kv", 2, "'blk.0.attn_qkv.weight': has shape"),
    (("gpt-oss",), "attention.sliding_window", -1, "must be an integer from 0"),
    (("glm4moe", "deepseek2"), "expert_used_count", 9, "must be an integer from 1 to 8"),
    (("deepseek2",), "expert_used_count", 5, "5 is above 4, the experts of expert_group_used_c"),
    (("deepseek2",), "expert_group_count", 8, "2 is above 1, the experts of expert_group_used_"),
]
DELTA, SHORT = ("qwen35", "qwen35moe", "qwen3next"), ("lfm2", "lfm2moe")
GEMMA, LATENT = ("gemma4", "gemma4-e", "gemma4-moe"), ("deepseek2", "deepseek2-noyarn")
NONE, EACH = "leaves none of . layers with attention", "must hold a boolean for each of . layers"
RECURRENCES = [
    (DELTA, "ssm.group_count", 0, "must be an integer from 1 to 4096"),
    (DELTA, "ssm.group_count", 1 << 40, "must be an integer from 1 to 4096"),
    (DELTA, "ssm.group_count", np.array([2, 2]), "must be an integer from 1 to 4096"),
    (DELTA, "ssm.group_count", 3, "time_step_rank: 4 must be a multiple of ssm.group_count=3"),
    (DELTA, "ssm.group_count", 4, "'blk.0.attn_qkv.weight': has shape"),
    (DELTA, "ssm.time_step_rank", 0, "must be an integer from 1"),
    (DELTA, "ssm.time_step_rank", 6, "inner_size: 256 must be a multiple of ssm.time_step_rank=6"),
    (DELTA, "ssm.time_step_rank", None, "is missing"),
    (
        DELTA,
        "ssm.inner_size",
        255,
        "inner_size: 255 must be a multiple of ssm.time_step_rank=4",
    ),
    (DELTA, "ssm.inner_size", "x", "must be an integer from 1 to 2048"),
    (DELTA, "ssm.conv_kernel", 0, "must be an integer from 1 to 64"),
    (DELTA, "ssm.conv_kernel", 65, "must be an integer from 1 to 64"),
    (DELTA, "ssm.conv_kernel", 3, "'blk.0.ssm_conv1d.weight': has shape"),
    (DELTA, "ssm.state_size", 0, "must be an integer from 1 to 512"),
    (DELTA, "ssm.state_size", 513, "must be an integer from 1 to 512"),
    (DELTA, "ssm.state_size", 128, "'blk.0.attn_qkv.weight': has shape"),
    (DELTA, "full_attention_interval", 0, "must be an integer from 1"),
    (DELTA, "full_attention_interval", 4.0, "must be an integer from 1"),
    (DELTA, "full_attention_interval", 2, "'blk.1.attn_qkv.weight': has shape"),
    (DELTA, "full_attention_interval", 6, f"full_attention_interval: {NONE}"),
    (DELTA[1:], "attention.recurrent_layers", np.array([True] * 3), f"recurrent_layers: {NONE}"),
    (DELTA, "attention.recurrent_layers", np.array([True, False]), EACH),
    (DELTA[:1], "attention.recurrent_layers", np.ones(5, int), EACH),
    (DELTA, "attention.recurrent_layers", True, EACH),
    (DELTA[:1], "attention.recurrent_layers", np.zeros(5, bool), "'blk.0.attn_qkv.*has shape"),
    (("qwen35-mtp",), "nextn_predict_layers", 2, f"full_attention_interval: {NONE}"),
    (("qwen35-mtp",), "nextn_predict_layers", 3, "must be an integer from 0 to 2"),
    (("qwen35-mtp",), "feed_forward_length", np.array([256] * 2), "has 2 entries, expected .* 3"),
    (("qwen35-mtp",), "attention.recurrent_layers", np.array([True, False]), EACH),
    (("qwen35-mtp",), "attention.recurrent_layers", np.array([True, True, False]), NONE),
    (SHORT, "shortconv.l_cache", 0, "must be an integer from 1 to 64"),
    (SHORT, "shortconv.l_cache", 1 << 40, "must be an integer from 1 to 64"),
    (SHORT, "shortconv.l_cache", None, "is missing"),
    (SHORT, "shortconv.l_cache", 4, "'blk.0.shortconv.conv.weight': has shape"),
    (SHORT, "attention.head_count_kv", 0, "head_count_kv: must not be 0 in every layer"),
    (SHORT[:1], "attention.head_count_kv", np.zeros(4, int), "must not be 0 in every layer"),
    (SHORT, "attention.head_count_kv", np.array([0, 2]), "has 2 entries, expected one for each"),
    (SHORT[:1], "attention.head_count_kv", np.array([0, 0, 3, 0]), "3 must divide .*=4"),
    (SHORT[:1], "attention.head_count_kv", np.array([0, 0, -2, 0]), "hold integers from 0 to 4"),
    (SHORT[:1], "attention.head_count_kv", np.full(4, 1 << 63, np.uint64), "hold integers from 0"),
    (SHORT[:1], "attention.head_count_kv", np.array([0, 2, 0, 0]), "'blk.1.attn_q.w.*is missing"),
    (SHORT[:1], "attention.head_count_kv", np.array([0.0, 0, 2, 0]), "is not an array of integers"),
    (SHORT[1:], "leading_dense_block_count", 4, "must be an integer from 0 to 3"),
]
HEADS = [
    (GEMMA, "attention.sliding_window_pattern", np.array([True]), "has 1 entries, expected one"),
    (GEMMA, "attention.sliding_window_pattern", np.ones(3, int), "must be an integer from 0"),
    (GEMMA, "attention.sliding_window_pattern", 1, "'blk.0.attn_q.weight': has shape"),
    (GEMMA, "attention.sliding_window", 0, "'blk.0.attn_q.weight': has shape"),
    (GEMMA[1:2], "attention.sliding_window_pattern", np.arange(7) < 4, "shared_kv_layers: 3 leav"),
    (GEMMA[1:2], "attention.sliding_window_pattern", 6, "shared_kv_layers: 3 leaves"),
    (GEMMA, "attention.shared_kv_layers", 7, "must be an integer from 0 to"),
    (
        GEMMA,
        "attention.shared_kv_layers",
        2,
        "leaves a layer without an earlier|attn_k.weight': is miss",
    ),
    (GEMMA[1:2], "attention.shared_kv_layers", 4, "4 leaves a layer without an earlier layer"),
    (GEMMA, "embedding_length_per_layer_input", 1 << 40, "must be an integer from 0"),
    (GEMMA, "embedding_length_per_layer_input", 1 << 24, "per_layer_token_embd.weight': "),
    (GEMMA[1:2], "embedding_length_per_layer_input", 0, "'per_layer_.*is not part of"),
    (GEMMA, "attention.key_length_swa", 513, "a head_dim of 513 is not supported; at most"),
    (GEMMA, "attention.key_length_swa", 1 << 40, "must be an integer from 1"),
    (GEMMA, "attention.key_length_swa", 32, "value_length_swa: 64 must equal the key length, 32"),
    (GEMMA, "attention.value_length", 64, "64 must equal the key length, 128"),
    (GEMMA, "rope.dimension_count_swa", 63, "63 must be even"),
    (GEMMA, "rope.dimension_count_swa", 66, "must be an integer from 1 to 64"),
    (GEMMA, "rope.freq_base_swa", math.nan, "must be a number above 1"),
    (GEMMA, "attention.head_count_kv", np.zeros(3, int), "must hold integers from 1|has 3 entries"),
    (GEMMA[:1], "attention.head_count_kv", np.array([2, 2, 3]), "3 must divide .*=4"),
    (GEMMA[:1], "attention.head_count_kv", np.array([2, 2, 8]), "must hold integers from 1 to 4"),
    (GEMMA[1:2], "feed_forward_length", np.full(3, 128), "has 3 entries, expected one for each"),
    (GEMMA[1:2], "feed_forward_length", np.full(7, 128), "'blk.4.ffn_gate.weight': has shape"),
    (GEMMA[1:2], "feed_forward_length", np.zeros(7, int), "must hold integers from 1 to"),
    (LATENT, "attention.kv_lora_rank", 0, "must be an integer from 1"),
    (LATENT, "attention.kv_lora_rank", 577, "a latent vector and its key have 640 elements, mor"),
    (LATENT, "attention.kv_lora_rank", 64, "key_length: is 160, expected 96"),
    (LATENT, "attention.q_lora_rank", 64, "'blk.0.attn_q_a.weight': has shape"),
    (LATENT, "attention.q_lora_rank", 0, "'blk.0.attn_q.weight': is missing"),
    (LATENT, "attention.key_length_mla", 32, "dimension_count: must be an integer from 2 to 31"),
    (LATENT, "attention.key_length_mla", 34, "'blk.0.attn_q_b.weight': has shape"),
    (LATENT, "attention.value_length_mla", 0, "must be an integer from 1"),
    (LATENT, "attention.value_length_mla", 32, "'blk.0.attn_v_b.weight': has shape"),
    (LATENT, "attention.value_length", 96, "is 96, expected 128, the latent vector's size"),
    (LATENT, "rope.dimension_count", 31, "31 must be even"),
    (LATENT, "attention.head_count_kv", 4, "is 4, expected 1 for the latent vector"),
    (LATENT[:1], "rope.scaling.yarn_log_multiplier", math.nan, "must be a number above"),
    (LATENT, "nextn_predict_layers", 3, "must be an integer from 0 to"),
]


@pytest.mark.parametrize(("names", "key", "value", "message"), NUMBERS + RECURRENCES + HEADS)
def test_keys_that_contradict_others_or_are_out_of_range(names, key, value, message):
    for name in names:
        metadata, tensors = header(name)
        changed = metadata | {f"{metadata['general.architecture']}.{key}": value}
        with pytest.raises(jq.GGUFError, match=f"bad.gguf: .*{message}"):
            check({k: v for k, v in changed.items() if v is not None}, tensors)


def test_fused_tensors_beside_their_parts():
    metadata, tensors = header("phi3")
    qkv = tensors["blk.0.attn_qkv.weight"]
    beside = {"blk.0.attn_k.weight": qkv.part("blk.0.attn_k.weight", 0, 64, 0)}
    with pytest.raises(
        jq.GGUFError, match="attn_qkv.weight': is present in addition to 'blk.0.attn_k.wei"
    ):
        check(metadata, tensors | beside)


@pytest.mark.slow("compiles several programs", quick=["deepseek2-noyarn"])
@pytest.mark.parametrize(
    "name", ["phi3-long", "gpt-oss-mxfp4", "qwen35moe", "lfm2", "gemma4-e", "deepseek2-noyarn"]
)
def test_damaged_files(name, tmp_path):
    data, rng, loaded = path(name).read_bytes(), np.random.default_rng(0), 0
    start, damaged = parse(data).data_start, tmp_path / "damaged.gguf"
    for _ in range(150):
        damaged.write_bytes(damage(data, start, rng))
        try:
            models.from_gguf(damaged)
            loaded += 1
        except jq.GGUFError as error:
            assert error.file == str(damaged) and error.field and error.problem
    assert 0 < loaded < 100


@pytest.mark.parametrize("divisor", [0, 1e-6])
def test_divisors_that_give_no_finite_angle(divisor, tmp_path):
    data = bytearray(path("phi3-long").read_bytes())
    at = parse(bytes(data))
    at = at.data_start + at.tensors["rope_factors_short.weight"].offset
    data[at : at + 4] = np.float32(divisor).tobytes()
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(jq.GGUFError, match="'rope_factors_short.weight': must hold numbers above"):
        models.from_gguf(tmp_path / "bad.gguf")


@pytest.mark.slow("compiles several programs", quick=["native"])
@needs_native
@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_a_router_of_nan_gives_nan_and_no_more(implementation):
    """Expert ids stay in range; tokens before the first one routed this way keep their logits."""
    tensors = models.named_tensors(model("qwen3moe"))
    router = tensors["blk.1.ffn_gate_inp.weight"].at[:].set(jnp.nan)
    changed = build(model("qwen3moe").config, tensors | {"blk.1.ffn_gate_inp.weight": router})
    with jq.implementation(implementation):
        assert jnp.isnan(changed(jnp.array(reference("qwen3moe").prompt[None, :4]))).all()


@pytest.mark.slow("compiles several programs")
@needs_native
def test_one_expert_is_a_dense_network():
    """Equals the dense network, since the only expert weight is one."""
    config = model("qwen3moe").config
    one = dataclasses.replace(config.experts, count=1, used=1)
    tensors = models.named_tensors(model("qwen3moe"))
    experts = {n: t[:1] for n, t in tensors.items() if "_exps" in n or "ffn_gate_inp" in n}
    llama = dataclasses.replace(config, architecture="qwen3", experts=None, intermediate_size=256)
    dense = {n.replace("_exps", ""): t[0] for n, t in experts.items() if "_exps" in n}
    others = {n: t for n, t in tensors.items() if n not in experts}
    tokens = jnp.array(reference("qwen3moe").prompt[None, :8])
    with jq.implementation("native", activations="f32"):
        got = build(dataclasses.replace(config, experts=one), others | experts)(tokens)
        want = build(llama, others | dense)(tokens)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
