"""Files of further architectures that are wrong: a typed error that names what is, or a load."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from gguf_bytes import damage, parse
from implementations import needs_native

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.architecture_tensors import OPTIONAL_BIASES
from jax_q4k.models.build import build
from jax_q4k.models.files.gguf import describe, used_tensors
from jax_q4k.models.tensors import expected_tensors

from .golden import FAMILIES, WITH_EXPERTS, model, path, reference


def check(metadata, tensors):
    """What loading does before it reads a tensor."""
    header = dataclasses.replace(
        jq.gguf.read_header(path("phi3")), metadata=metadata, tensors=tensors
    )
    return describe(metadata, used_tensors(header, "bad.gguf"), "bad.gguf")


def header(name):
    """Metadata and tensors of a golden file."""
    read = jq.gguf.read_header(path(name))
    return dict(read.metadata), dict(read.tensors)


@pytest.mark.parametrize("name", FAMILIES)
def test_missing_and_wrongly_shaped_tensors(name):
    metadata, tensors = header(name)
    config, _ = check(metadata, tensors)
    expected = expected_tensors(config)
    in_parts = {"attn_qkv": "attn_q", "ffn_up": "ffn_gate"} if config.kind.fused else {}
    for tensor, info in tensors.items():
        if ".1." in tensor and len(tensors) > 40:
            continue  # as in layer 0
        others = {other: info for other, info in tensors.items() if other != tensor}
        short = tensor.rpartition(".")[0].rpartition(".")[2]
        part = tensor.replace(short, in_parts.get(short, short))
        what = expected[part]
        optional = tensor.endswith(".bias") and what.entry.bias in OPTIONAL_BIASES
        optional &= what.entry.bias not in config.kind.biases
        if optional or (not what.required and not tensor.startswith("rope_factors")):
            check(metadata, others)
        else:
            rule = "is missing|is there without 'rope_factors"
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
    (("glm4moe",), "expert_gating_func", 3, "3 is not supported; supported are 1 .softmax., 2"),
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
    (("olmo3",), "rope.scaling.type", "ntk", "'ntk' is not supported; supported are none, lin"),
    (("phi3-long",), "rope.scaling.attn_factor", -1.0, "must be a number above"),
    (("phi3-long",), "rope.dimension_count", 64, "'rope_factors_long.weight': has shape"),
    (("phi3",), "attention.head_count_kv", 2, "'blk.0.attn_qkv.weight': has shape"),
    (("gpt-oss",), "attention.sliding_window", -1, "must be an integer from 0"),
]


@pytest.mark.parametrize(("names", "key", "value", "message"), NUMBERS)
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
    with pytest.raises(jq.GGUFError, match="attn_qkv.weight': is there beside 'blk.0.attn_k.wei"):
        check(metadata, tensors | beside)


@pytest.mark.parametrize("name", ["phi3-long", "gpt-oss-mxfp4"])
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


def test_divisors_that_give_no_finite_angle(tmp_path):
    data = bytearray(path("phi3-long").read_bytes())
    at = parse(bytes(data))
    at = at.data_start + at.tensors["rope_factors_short.weight"].offset
    data[at : at + 4] = np.float32(0).tobytes()
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(jq.GGUFError, match="'rope_factors_short.weight': must hold numbers above"):
        models.from_gguf(tmp_path / "bad.gguf")


@needs_native
@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_a_router_of_nan_gives_nan_and_no_more(implementation):
    """Ids stay in range; tokens before the first that is routed so keep their logits."""
    tensors = models.named_tensors(model("qwen3moe"))
    router = tensors["blk.1.ffn_gate_inp.weight"].at[:].set(jnp.nan)
    changed = build(model("qwen3moe").config, tensors | {"blk.1.ffn_gate_inp.weight": router})
    with jq.implementation(implementation):
        assert jnp.isnan(changed(jnp.array(reference("qwen3moe").prompt[None, :4]))).all()


@needs_native
def test_one_expert_is_a_dense_network():
    """Which it equals where its only weight is one."""
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
