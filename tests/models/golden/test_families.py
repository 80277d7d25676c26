"""Golden files of further architectures: their features beyond llama, and that each matters."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import needs_native
from support.paths import GOLDEN, TESTS

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.architectures import ARCHITECTURES
from jax_q4k.models.config.config import Scales
from jax_q4k.models.config.tensors import expected_tensors, unused_tensors
from jax_q4k.models.kv_cache import PagedCache
from jax_q4k.models.network.build import build

from ..golden_files import (
    FAMILIES,
    NAMES,
    VARIANTS,
    WITH_EXPERTS,
    check_logits,
    model,
    path,
    reference,
    routes_given,
)

pytestmark = needs_native

PROMPT = 48  # tokens
#: Models whose operations plain JAX runs in quick tests: attention, latent attention with experts,
#: delta nets. Every operation's own tests compare plain JAX with its definition.
PLAIN = ["llama-gqa", "deepseek2", "qwen35"]


@pytest.fixture(autouse=True)
def exact():
    with jq.implementation("native", activations="f32"):
        yield


def test_the_page_of_models_names_every_architecture_and_its_golden_files():
    head, rows = "| models | `general.architecture` | golden files |", []
    lines = (TESTS.parent / "docs/models.md").read_text().splitlines()
    for line in lines[lines.index(head) + 2 :]:
        if not line:
            break
        _, _, names, files, _ = (cell.strip() for cell in line.split("|"))
        rows += [(names.replace("`", "").split(", "), file) for file in files.split(", ")]
    assert {name for names, _ in rows for name in names} == {
        name for name, kind in ARCHITECTURES.items() if not kind.bidirectional
    }
    assert {file for _, file in rows} == {file.stem for file in GOLDEN.glob("*.json")}
    for names, file in rows:
        metadata = jq.gguf.read_header(path(file)).metadata
        assert metadata["general.architecture"] in names


_DEEP = pytest.param("gemma2-27b", marks=pytest.mark.slow("compiles 46 layers"))


@pytest.mark.parametrize(
    "name", [_DEEP if name == "gemma2-27b" else name for name in (*VARIANTS, *FAMILIES)]
)
def test_logits(name):
    check_logits(name)


@pytest.mark.slow("eight passes of 27 layers")
def test_int8_activations_of_many_layers():
    """int8 activations are on average as accurate as llama.cpp's.

    With 27 layers of 64 the effect of rounding is random, so the test averages over perturbations
    of the embedding, which contribute 1 % of the error.
    """
    name, ratios = "deepseek2-lite", []
    config, tensors = model(name).config, models.named_tensors(model(name))
    theirs = json.loads((GOLDEN / f"{name}.json").read_text())["nmse_q8act"]
    embedding = tensors["token_embd.weight"].dequantize()

    @jax.jit
    def logits(embedding, tokens):
        with routes_given(name):
            return build(config, tensors | {"token_embd.weight": embedding})(tokens)

    with jq.implementation("native"):
        for seed in range(8):
            noise = jax.random.normal(jax.random.key(seed), embedding.shape)
            got = logits(embedding * (1 + 1e-3 * noise), jnp.array(reference(name).tokens[None]))
            ratios.append(nmse(got[0, :PROMPT], reference(name).logits[:PROMPT]) / theirs)
    assert np.mean(ratios) <= 1.2


@pytest.mark.slow("compiles several programs", quick=["native"])
@pytest.mark.parametrize("implementation", ["xla", "native"])
def test_a_prompt_of_several_chunks(implementation):
    """150 tokens: chunks of 64 and a partial one."""
    name = "qwen35-long"
    with jq.implementation(implementation, activations="f32"):
        got = model(name).logits(reference(name).tokens[None])[0]
    assert nmse(got, reference(name).logits) <= 1e-8
    greedy = got[len(reference(name).prompt) - 1 : -1].argmax(-1)
    assert greedy.tolist() == reference(name).greedy.tolist()


@pytest.mark.slow("compiles each model by XLA alone", quick=PLAIN)
@pytest.mark.parametrize("name", [*NAMES, *VARIANTS, *FAMILIES])
def test_logits_of_plain_jax(name):
    with jq.implementation("xla", activations="f32"):
        got = model(name).logits(reference(name).tokens[None])
    assert got.shape == (1, *reference(name).logits.shape) and got.dtype == jnp.float32
    assert nmse(got[0], reference(name).logits) <= 1e-8


@pytest.mark.slow(
    "compiles two programs a model",
    quick=["gemma4-e", "deepseek2", "qwen35", "lfm2moe", "gpt-oss-mxfp4"],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_paged_decode_of_prompts_of_two_lengths(name):
    """Decodes all tokens after the first 40 and 13 in steps, with the logits of the full pass."""
    loaded, want = model(name), reference(name)
    prefill = jax.jit(lambda weights, *args: loaded.decoder(weights).prefill(*args))
    decode = jax.jit(lambda weights, *args: loaded.decoder(weights).decode(*args))
    lengths, steps = np.array([40, 13], np.int32), 32
    prompts = np.zeros((2, 40), np.int32)
    for row, length in zip(prompts, lengths, strict=True):
        row[:length] = want.tokens[:length]
    cache = PagedCache.create(loaded.config, 2, 72)
    logits, cache = prefill(loaded.weights, prompts, lengths, cache)
    rows = [logits]
    for step in range(steps):
        logits, cache = decode(loaded.weights, want.tokens[lengths + step], cache)
        rows.append(logits)
    got = np.stack(rows, axis=1)
    for row, length in zip(got, lengths, strict=True):
        assert nmse(row, want.logits[length - 1 : length + steps]) <= 1e-8
    greedy = got[0, PROMPT - 40 : -1].argmax(-1)
    assert greedy.tolist() == want.greedy[: len(greedy)].tolist()


@pytest.mark.slow("runs each model step by step", quick=["gpt-oss-mxfp4"])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_tokens_have_the_experts_that_llama_cpp_gives_them(name, monkeypatch):
    chosen, routed_mlp = [], jq.routed_mlp

    def recorded(x, logits, gate, up, down, top, *, selection_bias, **options):
        names = ("gating", "groups", "groups_used", "normalize", "scale")
        given = {name: options[name] for name in names}
        ids, _ = jq.route(logits, top, bias=selection_bias, **given)
        chosen.append(np.asarray(ids)[0])
        return routed_mlp(x, logits, gate, up, down, top, selection_bias=selection_bias, **options)

    monkeypatch.setattr(jq, "routed_mlp", recorded)
    model(name).decoder()(jnp.array(reference(name).tokens[None]))
    with np.load(GOLDEN / f"{name}.npz") as data:
        np.testing.assert_array_equal(chosen, data["routes_f32"])


@pytest.mark.slow("compiles each model twice", quick=["gemma4-e", "phi3-long", "qwen2-fused"])
@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_a_saved_file_holds_the_tensors_of_the_one_it_was_loaded_from(name, tmp_path):
    """Keeps names and fused tensors; architectures without fused tensors save them split."""
    loaded = model(name)
    models.save_gguf(loaded, tmp_path / "model.gguf")
    read = jq.gguf.read(path(name))
    metadata, want = read.metadata, read.tensors
    got = jq.gguf.read(tmp_path / "model.gguf").tensors
    fused = {} if loaded.config.kind.fused else {n for n in want if "attn_qkv" in n}
    missing = want.keys() - got.keys() - set(unused_tensors(metadata, want))
    assert missing == set(fused) - expected_tensors(loaded.config).keys()
    for tensor in want.keys() & got.keys():
        for a, b in zip(jax.tree.leaves(got[tensor]), jax.tree.leaves(want[tensor]), strict=True):
            np.testing.assert_array_equal(a, b)
    again = models.from_gguf(tmp_path / "model.gguf")
    assert again.config == loaded.config
    tokens = reference(name).prompt[None]
    np.testing.assert_array_equal(again.logits(tokens), loaded.logits(tokens))


#: (golden file, features of the architecture or config that are switched off).
FACTS = [
    ("cohere2", {"rotated": None}),
    ("cohere2", {"windowed": lambda layer: False, "rotated": lambda layer, _: layer % 4 < 3}),
    ("cohere2", {"layer_norm": False}),
    ("cohere2", {"scales": Scales()}),
    ("command-r", {"layer_norm": False}),
    ("glm4", {"interleaved_rope": False}),
    ("glm4", {"rope_dim": 64}),
    ("granite", {"scales": Scales(residual=0.22, attention=1 / 64, logits=0.5)}),
    ("granite", {"scales": Scales(embedding=0.75, attention=1 / 64, logits=0.5)}),
    ("granite", {"scales": Scales(embedding=0.75, residual=0.22, logits=0.5)}),
    ("granite", {"scales": Scales(embedding=0.75, residual=0.22, attention=1 / 64)}),
    ("granite-nope", {"has_rope": True}),
    ("mistral3", {"temperature_scale": 0.0}),
    ("mistral3", {"yarn": None}),
    ("mistral3", {"yarn": (32.0, 0.25, 1.0)}),
    ("mistral3", {"yarn": (1.0, 0.25, 0.0)}),
    ("olmo3", {"window": None}),
    ("olmo3", {"local_rope_theta": None}),
    ("olmo3", {"yarn": None}),
    ("phi3", {"rope_dim": 64}),
    ("phi3-long", {"original_context": 512}),
    ("phi3-long", {"rope_magnitude": 1.0}),
    ("phi3-short", {"original_context": 128}),
    ("llama-longrope", {"original_context": 512}),
    ("smollm3", {"rotated": None}),
    ("starcoder2", {"layer_norm": False}),
    ("starcoder2", {"activation": "silu"}),
    ("gpt-oss", {"activation": "silu"}),
    ("gpt-oss", {"window": None}),
    ("gpt-oss", {"yarn": None}),
    ("qwen3moe", {"experts": {"used": 2}}),
    ("qwen3moe", {"experts": {"normalize": False}}),
    ("qwen2moe", {"experts": {"normalize": True}}),
    ("glm4moe", {"experts": {"normalize": False}}),
    ("glm4moe", {"experts": {"scale": 1.0}}),
    ("glm4moe", {"experts": {"gating": "softmax"}}),
    ("granitemoe", {"experts": {"used": 1}}),
    ("qwen35", {"tiled_heads": False}),
    ("qwen35", {"rope_dim": 64}),
    ("qwen3next", {"tiled_heads": True}),
    ("gemma4", {"attention_scale": None}),
    ("gemma4-e", {"final_soft_cap": None}),
    ("gemma4", {"value_norm": False}),
    ("gemma4", {"window": 4}),
    ("gemma4-e", {"local_rope_theta": 1e6}),
    ("gemma4-moe", {"experts": {"used": 1}}),
    ("deepseek2", {"yarn": None}),
    ("deepseek2", {"interleaved_rope": False}),
    ("deepseek2", {"attention_scale": None}),
    ("deepseek2", {"experts": {"groups_used": 2}}),
    ("lfm2", {"rope_theta": 1e4}),
]
#: (golden file, part of tensor names, value that replaces them).
TENSORS = [
    ("command-r", "attn_norm.weight", 1.0),
    ("glm4", "post_attention_norm", 1.0),
    ("glm4", "post_ffw_norm", 1.0),
    ("glm4", "attn_q.bias", 0.0),
    ("olmo2", "attn_q_norm", 1.0),
    ("olmo2", "attn_k_norm", 1.0),
    ("olmo2", "post_ffw_norm", 1.0),
    ("llama-bias", "attn_output.bias", 0.0),
    ("llama-bias", "ffn_down.bias", 0.0),
    ("qwen2-fused", "attn_v.bias", 0.0),
    ("starcoder2", "ffn_norm.bias", 0.0),
    ("starcoder2", "ffn_up.bias", 0.0),
    ("gpt-oss", "attn_sinks", -1e4),
    ("gpt-oss", "ffn_gate_inp.bias", 0.0),
    ("gpt-oss", "ffn_gate_exps.bias", 0.0),
    ("gpt-oss", "ffn_up_exps.bias", 0.0),
    ("gpt-oss", "ffn_down_exps.bias", 0.0),
    ("glm4moe", "exp_probs_b", 0.0),
    ("glm4moe", "attn_q_norm", 1.0),
    ("qwen2moe", "ffn_gate_inp_shexp", 0.0),
    ("qwen35", "ssm_a", -1.0),
    ("qwen35", "ssm_dt.bias", 0.0),
    ("qwen35", "ssm_conv1d", 0.25),
    ("qwen35", "ssm_norm", 1.0),
    ("qwen35moe", "ffn_gate_inp_shexp", 0.0),
    ("lfm2", "shortconv.conv", 0.3),
    ("gemma4", "layer_output_scale", 1.0),
    ("gemma4", "rope_freqs", 1.0),
    ("gemma4-e", "per_layer_proj_norm", 1.0),
    ("gemma4-e", ".post_norm.", 1.0),
    ("gemma4-moe", "ffn_gate_inp.scale", 1.0),
    ("gemma4-moe", "ffn_down_exps.scale", 1.0),
    ("gemma4-moe", "pre_ffw_norm_2", 1.0),
    ("gemma4-moe", "post_ffw_norm_1", 1.0),
    ("gemma4-moe", "post_ffw_norm_2", 1.0),
    ("deepseek2", "attn_q_a_norm", 1.0),
    ("deepseek2", "attn_kv_a_norm", 1.0),
    ("deepseek2", "exp_probs_b", 0.0),
]


def prompt_error(name, config, tensors):
    """NMSE of the prompt's logits; runs step by step, so that nothing is recompiled."""
    prompt = jnp.array(reference(name).prompt[None])
    got = build(config, tensors)(prompt)
    return nmse(got[0], reference(name).logits[:PROMPT])


@pytest.mark.slow("runs a model step by step for each fact", quick=["deepseek2-facts48"])
@pytest.mark.parametrize(("name", "facts"), FACTS)
def test_every_fact_moves_the_logits(name, facts, monkeypatch):
    config, tensors = model(name).config, models.named_tensors(model(name))
    of_config = {field.name for field in dataclasses.fields(config)} & facts.keys()
    changed = {field: facts[field] for field in of_config}
    if "experts" in changed:
        changed["experts"] = dataclasses.replace(config.experts, **changed["experts"])
    of_kind = {fact: value for fact, value in facts.items() if fact not in of_config}
    kind = dataclasses.replace(config.kind, **of_kind)
    if "rope_dim" in changed:  # the divisors would not fit
        tensors = {n: t for n, t in tensors.items() if not n.startswith("rope")}
    monkeypatch.setitem(ARCHITECTURES, config.architecture, kind)
    assert prompt_error(name, dataclasses.replace(config, **changed), tensors) >= 1e-3


@pytest.mark.slow("runs a model step by step for each tensor", quick=["deepseek2-*"])
@pytest.mark.parametrize(("name", "part", "value"), TENSORS)
def test_every_tensor_moves_the_logits(name, part, value):
    config, tensors = model(name).config, models.named_tensors(model(name))
    replaced = {n: jnp.full(t.shape, value, jnp.float32) for n, t in tensors.items() if part in n}
    assert replaced
    assert prompt_error(name, config, tensors | replaced) >= 1e-3
