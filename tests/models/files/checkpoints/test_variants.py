"""Checkpoints whose config.json differs from published models, against transformers' logits."""

from __future__ import annotations

import contextlib
import functools
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.helpers import nmse
from support.implementations import needs_native
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.architectures.base import GROUP_BEST
from jax_q4k.models.config import rope
from jax_q4k.models.config.tensors import expected_tensors
from jax_q4k.models.files.checkpoints import checkpoint, config_json
from jax_q4k.models.support import json_fields

from ... import checkpoints
from ...adapters import ALPHA, CONFIG, RANK, random_pairs, write_gguf

pytestmark = needs_native

DATA = GOLDEN.parent / "checkpoints"
CASES = json.loads((DATA / "variants.json").read_text())
QUICK = ["deepseek2-groups", "gemma2-null", "gpt-oss-no-bias", "lfm2-conv-bias", "qwen3next"]
DYNAMIC = "rope_type 'dynamic' has no effect within max_position_embeddings=64"


@pytest.fixture(autouse=True)
def exact():
    with jq.implementation("native", activations="f32"):
        yield


@functools.cache
def expected() -> dict[str, np.ndarray]:
    with np.load(DATA / "variants.npz") as arrays:
        return dict(arrays)


def folder(name, tmp_path, **changes):
    """A case's folder with changes to config.json."""
    rng = np.random.default_rng(5)
    tensors = {
        key: (rng.integers(-64, 65, shape) / 128).astype(np.float32)
        for key, shape in CASES[name]["tensors"].items()
    }
    return checkpoints.write(tmp_path / "model", CASES[name]["config"] | changes, tensors)


def loaded(name, tmp_path, **changes) -> models.Model:
    is_dynamic = "dynamic" in name
    with pytest.warns(match=DYNAMIC) if is_dynamic else contextlib.nullcontext():
        return models.from_pretrained(folder(name, tmp_path, **changes))


@pytest.mark.slow("compiles a model for each case", quick=QUICK)
@pytest.mark.parametrize("name", CASES)
def test_the_logits_of_transformers(name, tmp_path, record_property):
    """Compares the checkpoint, then its saved or converted file; a cache gives the same tokens."""
    given, tokens = loaded(name, tmp_path), expected()["tokens"]
    logits = given.logits(tokens[None])
    error = nmse(logits[0], expected()[name])
    record_property(
        "figure", f"{name} checkpoint against transformers in float64: NMSE {error:.1e}"
    )
    assert error <= 1e-9
    if name in QUICK:
        models.quantize_file(tmp_path / "model", tmp_path / "model.gguf", "F32")
    else:
        models.save_gguf(given, tmp_path / "model.gguf")
    saved = models.from_gguf(tmp_path / "model.gguf")
    np.testing.assert_array_equal(saved.logits(tokens[None]), logits)
    steps = models.generate(saved, tokens[:4], max_new_tokens=5, ignore_end=True).tokens
    every = np.concatenate([tokens[:4], steps])
    greedy = np.asarray(saved.logits(every[None]))[0, 3:-1].argmax(-1)
    assert list(steps) == greedy.tolist()


def describe(name: str, rope: dict | None = None, **changes) -> config_json.Description:
    config = CASES[name]["config"] | changes
    if rope is not None:
        config["rope_parameters"] = config["rope_parameters"] | rope
    config = {key: value for key, value in config.items() if value is not ...}
    return config_json.describe(json_fields.JSONFields(config, "config.json"))


def test_saved_files_are_right_for_llama_cpp(tmp_path):
    """llama.cpp's own keys and tensors express variants where it has them."""
    metadata = describe("gemma2-null").metadata
    assert metadata["gemma2.attn_logit_softcapping"] == 1e6  # it divides by the cap
    assert metadata["gemma2.final_logit_softcapping"] == 1e6
    with models.CheckpointSource(folder("starcoder2-no-bias", tmp_path)) as source:
        zeros = [name for name in source.tensors if name.endswith(".bias") and "norm" not in name]
        assert len(zeros) == 2 * 6 and not any(source.read(name).any() for name in zeros)
        assert source.read("blk.0.attn_norm.bias").any()
    assert GROUP_BEST in describe("deepseek2-groups").metadata
    assert GROUP_BEST not in describe("deepseek3-no-interleave").metadata
    plain = describe("deepseek2-groups", topk_method="greedy")
    assert plain.config.experts.groups == 1 and GROUP_BEST not in plain.metadata


@pytest.mark.parametrize("name", ["deepseek3-no-interleave", "gemma2-null", "gemma3-scalar"])
def test_other_scales_of_scores_are_part_of_queries(name, tmp_path):
    """Without keys of this package, which llama.cpp ignores, a saved file is the same model."""
    with models.CheckpointSource(folder(name, tmp_path)) as source:
        metadata = {k: v for k, v in source.metadata.items() if not k.startswith("jax_q4k.")}
        tensors = {key: source.read(key) for key in source.tensors}
    assert not any(key.endswith(("attention.scale", "attn_factor")) for key in metadata)
    jq.gguf.write(tmp_path / "model.gguf", metadata, tensors)
    tokens = expected()["tokens"]
    logits = models.from_gguf(tmp_path / "model.gguf").logits(tokens[None])
    assert nmse(logits[0], expected()[name]) <= 1e-9


@pytest.mark.parametrize(
    ("scales", "magnitude"),
    [
        ({}, 1.0970 / 1.1525),
        ({"mscale": None}, 1.1386),
        ({"mscale": None, "mscale_all_dim": None}, 1.1386),
    ],
)
def test_yarns_magnitude_is_part_of_mlas_rotated_queries(scales, magnitude):
    """llama.cpp multiplies all scores by the square of any magnitude that it gives the rope."""
    found = describe("deepseek3-no-interleave", rope=scales).config
    assert rope.magnitude(found.ropes[0]) == pytest.approx(1, abs=1e-6)
    growth = 1.1525 if found.yarn[2] else 1.0
    assert found.attention_scale == pytest.approx(growth**2 / 32**0.5, rel=1e-4)
    query = next(
        t.entry for n, t in expected_tensors(found).items() if n.endswith("attn_q_b.weight")
    )
    factors = checkpoint.query_factor(query, found).reshape(2, 32)
    np.testing.assert_array_equal(factors[:, :16], 1)
    np.testing.assert_allclose(factors[:, 16:], magnitude**2, rtol=1e-4)
    with pytest.raises(jq.CheckpointError, match="attention_factor: must be above 1e-06 and up to"):
        describe("deepseek3-no-interleave", rope={"attention_factor": 1e4})


def test_scaled_queries_are_float32(tmp_path):
    path = folder("gemma2-null", tmp_path)
    stored = load_file(path / "model.safetensors")
    halves = {key: values.astype(np.float16) for key, values in stored.items()}
    save_file(halves, path / "model.safetensors")
    query, key = "blk.0.attn_q.weight", "blk.0.attn_k.weight"
    with models.CheckpointSource(path) as source:
        assert (source.types[query], source.types[key]) == ("F32", "F16")
        found = source.read(query)
    want = stored["model.layers.0.self_attn.q_proj.weight"] * np.sqrt(np.float64(32 / 50))
    assert found.dtype == np.float32 and nmse(found, want) <= 1e-14
    stored["model.layers.1.self_attn.q_proj.weight"][1, 2] = 3e38
    save_file(stored, path / "model.safetensors")
    changed = json.loads((path / "config.json").read_text()) | {"query_pre_attn_scalar": 0.5}
    (path / "config.json").write_text(json.dumps(changed))
    message = "layers.1.self_attn.q_proj.weight': is so large that scaled queries are infinite"
    with models.CheckpointSource(path) as source, pytest.raises(jq.CheckpointError, match=message):
        source.read("blk.1.attn_q.weight")
    with pytest.raises(jq.CheckpointError, match="query_pre_attn_scalar: must be a number above"):
        describe("gemma2-null", query_pre_attn_scalar=1e-12)


def test_adapters_of_checkpoints_whose_queries_are_scaled(tmp_path):
    """The reference adds PEFT's products to the checkpoint's own weights."""
    name, rng = "gemma2-null", np.random.default_rng(3)
    given, tokens = loaded(name, tmp_path), expected()["tokens"][None]
    tensors, adapter, pairs = load_file(tmp_path / "model" / "model.safetensors"), {}, {}
    for module, gguf in (("q_proj", "attn_q"), ("o_proj", "attn_output")):
        path = f"model.layers.0.self_attn.{module}"
        n, k = tensors[f"{path}.weight"].shape
        a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((RANK, k), (n, RANK)))
        adapter[f"base_model.model.{path}.lora_A.weight"] = a
        adapter[f"base_model.model.{path}.lora_B.weight"] = b
        pairs[f"blk.0.{gguf}.weight"] = a, b
        tensors[f"{path}.weight"] += np.float32(ALPHA / RANK) * (b @ a)
    merged = checkpoints.write(tmp_path / "merged", CASES[name]["config"], tensors)
    want = models.from_pretrained(merged).logits(tokens)
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(CONFIG))
    save_file(adapter, tmp_path / "peft" / "adapter_model.safetensors")
    models.save_gguf(given, tmp_path / "model.gguf")
    saved = models.from_gguf(tmp_path / "model.gguf")
    converted = write_gguf(tmp_path / "a.gguf", given, pairs)
    for base, path in ((given, "peft"), (saved, "peft"), (saved, converted)):
        assert nmse(models.with_lora(base, tmp_path / path).logits(tokens), want) <= 1e-9


def test_yarns_divisors_are_in_metadata_where_llama_cpp_reads_no_tensor(tmp_path):
    for name, in_tensor in (("qwen3-yarn-no-truncate", False), ("llama-yarn-mscale", True)):
        models.save_gguf(loaded(name, tmp_path), tmp_path / "model.gguf")
        header = jq.gguf.read_header(tmp_path / "model.gguf")
        assert ("rope_freqs.weight" in header.tensors) == in_tensor
        assert ("jax_q4k.rope_freqs" in header.metadata) != in_tensor


def test_values_that_are_left_out():
    """null and missing keys have transformers' defaults."""
    default = describe(
        "gemma2-null", attn_logit_softcapping=..., final_logit_softcapping=...
    ).config
    assert (default.attention_soft_cap, default.final_soft_cap) == (50.0, 30.0)
    assert describe("starcoder2-no-bias", use_bias=...).zero_biases == ()
    interleaves = describe("deepseek3-no-interleave", rope_interleave=None).config
    assert interleaves.checkpoint_interleaved is None
    assert not describe("qwen3moe", norm_topk_prob=...).config.experts.normalize
    assert describe("qwen3next", norm_topk_prob=...).config.experts.normalize
    assert describe("qwen35moe", norm_topk_prob=False).config.experts.normalize  # as its class
    yarn = describe("llama-yarn-mscale", rope={"factor": None}).config
    assert yarn.rope_factor == 64 / 16
    linear = {"rope_type": "linear", "mscale_all_dim": 1.1, "factor": 4.0}
    scale = describe("deepseek3-no-interleave", rope=linear).config.attention_scale
    with_yarn = describe("deepseek3-no-interleave").config.attention_scale
    assert scale == pytest.approx(with_yarn, rel=1e-6)
    sections = describe("qwen35", rope={"mrope_section": [11, 11, 10]})
    assert sections.metadata["qwen35.rope.dimension_sections"].sum() == 8


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_partial_rotation_that_a_class_lacks(kind):
    rope = {"rope_type": kind, "factor": 2.0, "partial_rotary_factor": 0.5}
    message = f"factor: is 0.5, expected 1: LlamaForCausalLM rotates whole heads, .* {kind!r}"
    with pytest.raises(jq.CheckpointError, match=message):
        describe("llama-partial", rope=rope)


def test_the_context_of_dynamic_scaling(tmp_path):
    model = loaded("llama-dynamic", tmp_path)
    assert model.config.context_length == 64
    with pytest.raises(ValueError, match="the context length is 64"):
        model.logits(np.ones((1, 65), np.int32))


def test_adapters_of_checkpoints_whose_rope_is_not_interleaved(tmp_path):
    """The reference adds PEFT's products to the checkpoint's own rows."""
    name, rng = "deepseek3-no-interleave", np.random.default_rng(3)
    given, tokens = loaded(name, tmp_path), expected()["tokens"][None]
    tensors, adapter = load_file(tmp_path / "model" / "model.safetensors"), {}
    for module in ("q_b_proj", "kv_a_proj_with_mqa", "o_proj"):
        path = f"model.layers.0.self_attn.{module}"
        n, k = tensors[f"{path}.weight"].shape
        a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((RANK, k), (n, RANK)))
        adapter[f"base_model.model.{path}.lora_A.weight"] = a
        adapter[f"base_model.model.{path}.lora_B.weight"] = b
        tensors[f"{path}.weight"] += np.float32(ALPHA / RANK) * (b @ a)
    merged = checkpoints.write(tmp_path / "merged", CASES[name]["config"], tensors)
    want = models.from_pretrained(merged).logits(tokens)
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(CONFIG))
    save_file(adapter, tmp_path / "peft" / "adapter_model.safetensors")
    models.save_gguf(given, tmp_path / "model.gguf")
    saved = models.from_gguf(tmp_path / "model.gguf")
    for base in (given, saved):
        assert nmse(models.with_lora(base, tmp_path / "peft").logits(tokens), want) <= 1e-9
    assert nmse(given.logits(tokens), want) > 1e-3
    pairs = random_pairs(given, ("attn_q_b",))
    with pytest.raises(jq.GGUFError, match="is of blk.0.attn_q_b.weight, whose rows were"):
        models.with_lora(saved, write_gguf(tmp_path / "a.gguf", given, pairs))
    unrotated = random_pairs(given, ("attn_output",))
    models.with_lora(saved, write_gguf(tmp_path / "a.gguf", given, unrotated))
