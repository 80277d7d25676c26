"""Hugging Face checkpoints: golden logits and tokens, transformers' results, malformed folders."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import struct
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.helpers import nmse
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.config.rope import Rope
from jax_q4k.models.config.tensors import expected_tensors
from jax_q4k.models.files.checkpoints import config_json, rope_json
from jax_q4k.models.files.checkpoints.checkpoint import interleaved
from jax_q4k.models.sampling.file_defaults import default_sampling
from jax_q4k.models.support import json_fields

from ... import checkpoints
from ...golden_files import NAMES, model, path, reference
from ...tokenizer.test_from_json import damaged

FOLDERS = GOLDEN.parent / "checkpoints"
INDEX = "model.safetensors.index.json"
TRANSFORMERS = ("llama", "mistral", "qwen2", "qwen3")


@functools.cache
def loaded(name: str) -> models.Model:
    return models.from_pretrained(FOLDERS / name)


@pytest.fixture
def copy(tmp_path):
    """Returns a function that copies a checkpoint to a folder that a test may damage."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(FOLDERS / name, tmp_path / name))

    return make


def change(path: Path, *keys, **values) -> None:
    """Sets keys of a JSON object, or of the nested object at `keys`; None removes a key."""
    content = json.loads(path.read_text())
    inner = functools.reduce(lambda value, key: value[key], keys, content)
    inner.update(values)
    for key in [key for key, value in inner.items() if value is None]:
        del inner[key]
    path.write_text(json.dumps(content))


def refused(path: Path, message: str) -> jq.CheckpointError:
    with pytest.raises(jq.CheckpointError, match=message) as caught:
        models.from_pretrained(path)
    assert str(path) in caught.value.file and caught.value.field
    return caught.value


def test_a_folder_whose_name_is_no_unicode(copy, tmp_path):
    folder = copy("llama").rename(tmp_path / os.fsdecode(b"tiny\xff"))
    models.quantize_file(folder, tmp_path / "out.gguf", "Q8_0")
    assert models.from_gguf(tmp_path / "out.gguf").metadata["general.name"] == "Tiny?"


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", NAMES)
def test_golden_logits_and_tokens(name, tmp_path, monkeypatch):
    tensors, config, divisors = checkpoints.weights(name)
    described = checkpoints.config_json(config) | {
        "tie_word_embeddings": "lm_head.weight" not in tensors
    }
    if divisors is not None:  # this file's divisors follow no formula
        described["rope_scaling"] = {"rope_type": "llama3"}
        monkeypatch.setattr(rope_json.Rope, "divisors", lambda *_: {"rope_freqs.weight": divisors})
    folder = checkpoints.write(tmp_path / "model", described, tensors, shards=1 + len(name) % 3)
    got, want = models.from_pretrained(folder), reference(name)
    assert got.tokenizer is None and got.metadata["general.name"] == "Model"
    logits = np.asarray(got.logits(want.tokens[None]))[0]
    assert nmse(logits, want.logits) <= 1e-8
    assert nmse(logits, model(name).logits(want.tokens[None])[0]) <= 1e-10
    assert np.array_equal(logits[len(want.prompt) - 1 : -1].argmax(-1), want.greedy)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_logits_of_transformers(name, record_property):
    with np.load(FOLDERS / name / "expected.npz") as want:
        error = nmse(loaded(name).logits(want["tokens"][None])[0], want["logits"])
    record_property(
        "figure", f"{name} checkpoint against transformers in float64: NMSE {error:.1e}"
    )
    assert error <= 1e-11


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_the_ids_of_transformers(name):
    t = loaded(name).tokenizer
    assert t.vocab_size == loaded(name).config.vocab_size
    for row in json.loads((FOLDERS / name / "ids.json").read_text()):
        assert t.encode(row["text"], add_special=False) == row["ids"]
        assert t.encode(row["text"], parse_special=True) == row["ids_with_special"]


def test_generated_text():
    out = models.generate(loaded("llama"), "Hello", max_new_tokens=8)
    assert len(out.tokens) == 8 and out.text == loaded("llama").tokenizer.decode(
        out.tokens, strip_prefix=False
    )


def test_tokenizers_of_checkpoints():
    llama, qwen = loaded("llama").tokenizer, loaded("qwen2").tokenizer
    assert (llama.bos_token_id, llama.eos_token_ids) == (1, (2,))
    assert [qwen.token(i) for i in qwen.eos_token_ids] == ["<|im_end|>", "<|endoftext|>"]
    messages = [{"role": "user", "content": "hi"}]
    assert models.chat.render(qwen, messages) == "<|im_start|>user\nhi<|im_end|>\n"
    assert llama.chat_template is None and loaded("mistral").tokenizer is None


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_source_has_ggufs_names_shapes_and_dtypes(name):
    dtype = {
        "llama": jnp.bfloat16,
        "mistral": np.float32,
        "qwen2": np.float16,
        "qwen3": jnp.bfloat16,
    }[name]
    with models.CheckpointSource(FOLDERS / name) as source:
        config = models.Config.from_metadata(source.metadata)
        expected = expected_tensors(config)
        assert {
            key for key, (_, required, *_) in expected.items() if required
        } <= source.tensors.keys()
        assert ("output.weight" in source.tensors) == (name != "qwen2")
        assert (
            ("blk.0.ffn_up.bias" in source.tensors)
            == ("rope_freqs.weight" in source.tensors)
            == (name == "llama")
        )
        for key, shape in source.tensors.items():
            tensor = source.read(key)
            assert tensor.shape == shape == expected[key].shape
            assert tensor.dtype == (dtype if tensor.ndim == 2 else np.float32), key
            assert np.array_equal(np.asarray(models.named_tensors(loaded(name))[key]), tensor)


def test_weights_are_the_files_own():
    stored = load_file(FOLDERS / "qwen2" / "model.safetensors")
    tensors = models.named_tensors(loaded("qwen2"))
    for got, name in (
        ("token_embd", "embed_tokens"),
        ("blk.1.attn_q", "layers.1.self_attn.q_proj"),
    ):
        assert np.array_equal(tensors[f"{got}.weight"], stored[f"model.{name}.weight"])
    bias = stored["model.layers.1.self_attn.k_proj.bias"]
    assert np.array_equal(tensors["blk.1.attn_k.bias"], bias.astype(np.float32))


def test_rows_for_interleaved_rope():
    rows = np.arange(2 * 6 * 3).reshape(12, 3)
    got = interleaved(rows, 2)
    assert (got[:, 0] // 3).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert np.array_equal(checkpoints.halves(got, 2), rows)
    assert np.array_equal(interleaved(rows[:, 0], 2), got[:, 0])
    last = interleaved(rows, 2, last=4)  # of MLA's heads, whose first dimensions stay
    assert (last[:, 0] // 3).tolist() == [0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11]


def test_one_file_of_a_folder_and_progress(copy):
    folder, calls = copy("qwen2"), []
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    got = models.from_pretrained(
        folder / "other.safetensors", progress=lambda *call: calls.append(call)
    )
    assert calls[0][0] == 0 and calls[-1][0] == calls[-1][1] == sum(
        array.nbytes for array in load_file(folder / "other.safetensors").values()
    )
    assert np.array_equal(got.logits([[1, 2]]), loaded("qwen2").logits([[1, 2]]))
    refused(folder, "model.safetensors: is missing, and so is model.safetensors.index.json")


def test_saved_and_loaded_again(tmp_path):
    for name in ("llama", "qwen2"):
        models.save_gguf(loaded(name), tmp_path / "model.gguf")
        again = models.from_gguf(tmp_path / "model.gguf")
        assert np.array_equal(again.logits([[3, 1, 2]]), loaded(name).logits([[3, 1, 2]]))
        assert again.tokenizer.encode("Hello, it's me") == loaded(name).tokenizer.encode(
            "Hello, it's me"
        )


def test_early_files(copy):
    """rope_scaling with `type`, a separate `rope_theta`, and inv_freq buffers."""
    mistral = copy("mistral")
    change(
        mistral / "config.json",
        rope_parameters=None,
        rope_theta=1e4,
        rope_scaling={"type": "linear", "factor": 4},
    )
    tensors = load_file(mistral / "model.safetensors")
    for name in ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"):
        tensors[name] = np.zeros(16, np.float32)
    save_file(tensors, mistral / "model.safetensors")
    want = loaded("mistral").logits([[5, 6, 7]])
    assert np.array_equal(models.from_pretrained(mistral).logits([[5, 6, 7]]), want)


def test_a_sliding_window_leaves_the_context_as_it_is(copy):
    config = loaded("mistral").config
    assert (config.context_length, config.windows) == (256, (128,))
    folder = copy("qwen2")
    length = loaded("qwen2").config.context_length
    for used, windows in ((False, ()), (True, (64,))):
        change(
            folder / "config.json",
            use_sliding_window=used,
            sliding_window=64,
            max_window_layers=1,
            layer_types=None,
        )
        config = models.from_pretrained(folder).config
        assert (config.context_length, config.windows) == (length, windows)


def test_keys_that_a_class_does_not_know_are_ignored(copy):
    """Like transformers: Qwen 2's biases are fixed, and Llama has no window."""
    qwen, llama = copy("qwen2"), copy("llama")
    change(qwen / "config.json", attention_bias=True, mlp_bias=True)
    change(llama / "config.json", use_sliding_window=True, sliding_window=4)
    for folder in (qwen, llama):
        assert models.from_pretrained(folder).config == loaded(folder.name).config


def test_values_of_keys_that_are_missing(copy):
    llama, mistral, qwen = copy("llama"), copy("mistral"), copy("qwen3")
    change(llama / "config.json", tie_word_embeddings=None)
    assert models.from_pretrained(llama).decoder().output is not None
    change(mistral / "config.json", rope_parameters=None, rope_theta=None)
    assert models.from_pretrained(mistral).config.rope_theta == 10000
    change(qwen / "config.json", attention_bias=True)
    refused(qwen, r"tensor 'model.layers.0.self_attn.q_proj.bias': is missing")


def describe(name: str, **changes) -> config_json.Description:
    """Describes a golden model's config.json with changes; None removes a key."""
    config = models.Config.from_metadata(jq.gguf.read_header(path(name)).metadata)
    values = checkpoints.config_json(config) | changes
    values = {key: value for key, value in values.items() if value is not None}
    return config_json.describe(json_fields.JSONFields(values, "config.json"))


def test_gemmas_are_tied_unless_they_say_otherwise():
    assert [describe(name).tied for name in ("gemma", "gemma2", "gemma3", "llama-gqa")] == [
        *[True] * 3,
        False,
    ]
    assert not describe("gemma3", tie_word_embeddings=False).tied


def test_rope_parameters_of_each_type_of_layer():
    """transformers 5 writes one set of rope parameters per layer type."""
    whole = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    rope = {"full_attention": whole, "sliding_attention": {"rope_theta": 1e4}}
    early = {"rope_theta": None, "rope_scaling": None, "rope_local_base_freq": None}
    assert describe("gemma3", rope_parameters=rope, **early).config == model("gemma3").config
    rope["sliding_attention"]["rope_theta"] = 5e4
    assert describe("gemma3", rope_parameters=rope, **early).config.local_rope_theta == 5e4
    rope["sliding_attention"]["rope_type"] = "linear"
    with pytest.raises(jq.CheckpointError, match="sliding_attention.rope_type: 'linear' is not"):
        describe("gemma3", rope_parameters=rope, **early)


def test_the_activation_of_early_gemmas():
    early = {"hidden_act": "gelu", "hidden_activation": None}
    assert describe("gemma", **early).config == model("gemma").config
    with pytest.raises(jq.CheckpointError, match="hidden_act: is 'gelu', which is not supported"):
        describe("gemma2", **early)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: must be a number above"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping: must be a number"),
        ("gemma2", {"sliding_window": None}, "sliding_window: is missing"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: is 50.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention: is True"),
        ("gemma", {"hidden_activation": "silu"}, "hidden_activation: is 'silu'"),
    ],
)
def test_gemmas_that_are_refused(name, changes, message):
    with pytest.raises(jq.CheckpointError, match=message):
        describe(name, **changes)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_decoder_of_a_model_that_takes_images(prefix, tmp_path):
    """Follows transformers 4 and 5, without keys that equal text_config's defaults."""
    tensors, config, _ = checkpoints.weights("gemma3")
    inner = checkpoints.config_json(config)
    for key in ("architectures", "hidden_act", "layer_types"):
        del inner[key]
    described = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner}
    names = {name: name.replace("model.", prefix, 1) for name in tensors}
    stored = {names[name]: rows for name, rows in tensors.items()}
    vision = prefix.partition("language")[0] + "vision_tower.embedding.weight"
    folder = checkpoints.write(tmp_path / "both", described, stored | {vision: np.zeros(3)})
    with pytest.warns(UserWarning, match="1 tensors are skipped, .* use: images"):
        got = models.from_pretrained(folder)
    assert got.config == config
    packed = models.named_tensors(model("gemma3"))
    for name, tensor in models.named_tensors(got).items():
        want = packed[name]
        want = want.dequantize() if isinstance(want, jq.QuantizedArray) else want
        np.testing.assert_allclose(tensor, want, rtol=1e-6)
    stored["model.audio.weight"] = np.zeros(3, np.float32)
    refused(checkpoints.write(folder, described, stored), "'model.audio.weight': is not part of")
    del stored["model.audio.weight"]
    name = "model.layers.0.self_attn.q_proj.weight"
    twice = stored | {name: np.zeros_like(tensors[name])}
    message = f"is the decoder's '{name}', like '({name}|{names[name]})'"
    refused(checkpoints.write(folder, described, twice), message)
    del inner["hidden_size"]
    refused(checkpoints.write(folder, described, stored), "text_config.hidden_size: is missing")


def test_defaults_of_a_text_config():
    """gemma-3-4b-it omits 8 heads of 256 and others, which are the class's defaults."""
    inner = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner}
    config = config_json.describe(json_fields.JSONFields(values, "config.json")).config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.context_length, config.window) == (262208, 131072, 1024)
    assert (
        config.ropes == (Rope(1e6, 256, 8.0), Rope(1e4, 256, divided=False))
        and config.norm_eps == 1e-6
    )
    inner["num_attention_heads"] = 7
    with pytest.raises(jq.CheckpointError, match=r"text_config.num_key_value_heads: 4 must divide"):
        config_json.describe(json_fields.JSONFields(values, "config.json"))


def test_llama3_divisors():
    with models.CheckpointSource(FOLDERS / "llama") as source:
        got = source.read("rope_freqs.weight")
    wavelengths = [2 * math.pi * 10000 ** (2 * i / 32) for i in range(16)]
    for divisor, wavelength in zip(got, wavelengths, strict=True):
        smooth = (64 / wavelength - 1) / (4 - 1)
        middle = 1 / ((1 - smooth) / 8 + smooth)
        assert divisor == pytest.approx(
            1 if wavelength < 16 else 8 if wavelength > 64 else middle, rel=1e-6
        )
    assert 1.0 in got and 8.0 in got


def test_ids_of_the_other_files(copy):
    """BOS and EOS of generation_config.json and config.json.

    They apply if tokenizer_config.json names none.
    """
    folder = copy("qwen2")
    change(folder / "tokenizer_config.json", eos_token=None)
    change(folder / "config.json", bos_token_id=4, eos_token_id=9)
    assert models.from_pretrained(folder).tokenizer.vocabulary.eos_token_id == 9
    change(folder / "config.json", eos_token_id=None, text_config={"eos_token_id": 8})
    assert models.from_pretrained(folder).tokenizer.vocabulary.eos_token_id == 8
    change(folder / "config.json", eos_token_id=9)
    assert models.from_pretrained(folder).tokenizer.vocabulary.eos_token_id == 9
    change(folder / "generation_config.json", eos_token_id=[7, 280, 8])
    t = models.from_pretrained(folder).tokenizer
    assert (t.bos_token_id, t.vocabulary.eos_token_id, t.eos_token_ids) == (
        4,
        7,
        (7, 8, 280, 281),
    )
    assert t.encode("a", add_special=True) == t.encode("a", add_special=False)
    change(folder / "generation_config.json", eos_token_id=[1, 2, 3, 4])
    loaded = models.from_pretrained(folder)
    assert loaded.tokenizer.eos_token_ids == (1, 2, 3, 4, 280, 281)
    with pytest.raises(jq.CheckpointError, match="generation_config.json: eos_token_id: .* more"):
        models.save_gguf(loaded, folder / "saved.gguf")
    for wrong in (290, -1, True, "2", [None]):
        change(folder / "generation_config.json", eos_token_id=wrong)
        refused(
            folder, r"generation_config.json: eos_token_id: .* must be an integer from 0 to 289"
        )


def test_how_a_checkpoint_is_sampled(copy):
    """Sampling parameters of generation_config.json become GGUF's, if it samples."""
    folder = copy("qwen2")
    file = folder / "generation_config.json"
    assert not [key for key in models.from_pretrained(folder).metadata if "sampling" in key]
    change(file, do_sample=True, top_k=20, top_p=0.75, repetition_penalty=None)
    loaded = models.from_pretrained(folder)
    want: dict[str, float] = {"temperature": 1.0, "top_k": 20, "top_p": 0.75}
    assert default_sampling(loaded.metadata) == want
    models.save_gguf(loaded, folder / "saved.gguf")
    assert default_sampling(models.load(folder / "saved.gguf").metadata) == want
    change(file, top_k=None)
    want["top_k"] = 50  # transformers' default
    assert default_sampling(models.from_pretrained(folder).metadata) == want
    change(file, do_sample=False)
    assert default_sampling(models.from_pretrained(folder).metadata) == {"temperature": 0.0}
    change(file, do_sample=None, repetition_penalty=1.25)
    want = {"temperature": 0.0, "repetition_penalty": 1.25}
    assert default_sampling(models.from_pretrained(folder).metadata) == want
    change(file, repetition_penalty=None)
    assert default_sampling(models.from_pretrained(folder).metadata) == {}
    for wrong in ("hot", True, [1]):
        change(file, do_sample=True, top_p=wrong)
        refused(folder, r"generation_config.json: top_p: .* must be a number")
    file.unlink()
    change(folder / "config.json", do_sample=True, temperature=0.5)
    want = {"temperature": 0.5, "top_k": 50}
    assert default_sampling(models.from_pretrained(folder).metadata) == want


def test_settings_of_generation_that_are_not_applied(copy):
    folder = copy("qwen2")
    file = folder / "generation_config.json"
    neutral = {"num_beams": 1, "typical_p": 1.0, "bad_words_ids": [], "no_repeat_ngram_size": 0}
    with warnings.catch_warnings(action="error"):
        change(file, do_sample=True, max_length=20, **neutral)
        models.CheckpointSource(folder)
        change(file, do_sample=False, typical_p=0.9)  # only for sampling
        models.CheckpointSource(folder)
    change(file, do_sample=True, num_beams=4, suppress_tokens=[3], min_new_tokens=2)
    with pytest.warns(UserWarning) as caught:
        models.CheckpointSource(folder)
    [message] = [str(warning.message) for warning in caught]
    asked = "min_new_tokens=2, num_beams=4, suppress_tokens=[3], typical_p=0.9: ignored here"
    assert str(file) in message and asked in message


CONFIG = [
    (
        {"architectures": ["FalconForCausalLM"]},
        r"architectures: \['FalconForCausalLM'\] is not supported; supported: BertModel",
    ),
    ({"architectures": None, "model_type": None}, "architectures: is missing"),
    ({"model_type": "qwen2"}, "model_type: is 'qwen2', the type of Qwen2ForCausalLM, not of Llama"),
    ({"architectures": []}, r"architectures: \[\] is not supported"),
    (
        {"quantization_config": {"quant_method": "hqq"}},
        "quantization_config: is 'hqq', which is not supported; supported: awq, bits",
    ),
    (
        {"auto_map": {"AutoModelForCausalLM": "them/it--modeling_x.MyLlama"}},
        "auto_map.AutoModelForCausalLM: is 'them/it--modeling_x.MyLlama', the model's own code",
    ),
    ({"auto_map": "x"}, "auto_map: must be an object, not a string"),
    ({"qk_clip": 5.0}, "qk_clip: is 5.0, which is not supported"),
    (
        {"rope_parameters": {"rope_type": "default", "rope_scale": 2}},
        "rope_parameters.rope_scale: is 2, which is not supported",
    ),
    ({"per_layer_config": {"0": {"head_dim": 64}}}, "per_layer_config: is .*, which is not"),
    ({"hidden_act": "gelu"}, "hidden_act: is 'gelu', which is not supported"),
    ({"layer_types": ["chunked_attention"]}, "layer_types: 'chunked_attention' is not supported"),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_slow": 1e-300}},
        "rope_parameters.beta_slow: must be 0 or from 1e-06 to 1e6, not 1e-300",
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": -1}},
        "rope_parameters.beta_fast: must be 0 or from 1e-06 to 1e6, not -1",
    ),
    (
        {"rope_parameters": None, "rope_scaling": {"type": "axial"}},
        "rope_scaling.rope_type: 'axial' is not supported",
    ),
    ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: differs from rope_parameters"),
    (
        {"rope_parameters": {"rope_type": "linear"}},
        "rope_parameters.factor: is missing, expected a number",
    ),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        "rope_parameters.factor: must be a number above",
    ),
    ({"rope_parameters": {"rope_theta": 0.5}}, "rope_theta: must be a number above 1"),
    (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8}},
        "rope_parameters.low_freq_factor: is missing",
    ),
    ({"rope_parameters": []}, "rope_parameters: must be an object, not an array"),
    ({"hidden_size": "32"}, "hidden_size: must be an integer, not a string"),
    ({"hidden_size": 2**40}, "hidden_size: must be an integer from 1 to 16777216"),
    ({"hidden_size": None}, "hidden_size: is missing, expected an integer"),
    ({"num_hidden_layers": True}, "num_hidden_layers: must be an integer, not a boolean"),
    ({"num_hidden_layers": 0}, "num_hidden_layers: must be an integer from 1 to 1024, not 0"),
    (
        {"num_hidden_layers": 2},
        r"tensor 'model.layers.1.\S*': is missing, expected with shape \(128, 32\)",
    ),
    ({"num_key_value_heads": 3}, "num_key_value_heads: 3 must divide"),
    ({"num_key_value_heads": None}, r"k_proj.weight': has shape \(64, 32\), expected \(128, 32\)"),
    ({"head_dim": 1024}, "head_dim: a head_dim of 1024 is not supported"),
    ({"rms_norm_eps": 1e999}, "JSON: is malformed: Infinity is not JSON"),
    ({"rms_norm_eps": None}, "rms_norm_eps: is missing, expected a number"),
    ({"rms_norm_eps": 0}, "rms_norm_eps: must be a number above 0"),
    ({"vocab_size": 345}, r"embed_tokens.weight': has shape \(344, 32\), expected \(345, 32\)"),
    (
        {"vocab_size": 300},
        "tokenizer.json: model.vocab: .* expected less than 300, the model's vocab_size",
    ),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: must be a boolean"),
    (
        {"attention_bias": False},
        "'model.layers.0.self_attn.k_proj.bias': is not part of a llama model",
    ),
    ({"mlp_bias": None}, "'model.layers.0.mlp.down_proj.bias': is not part of a llama model"),
]


@pytest.mark.parametrize(("changes", "message"), CONFIG, ids=[message for _, message in CONFIG])
def test_configs_that_are_refused(changes, message, copy):
    folder = copy("llama")
    change(folder / "config.json", **changes)
    refused(folder, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": 0}, "factor: must be a number above 1e-06"),
        ({"factor": None}, "factor: is missing"),
        ({"high_freq_factor": 1.0}, "high_freq_factor: must be above low_freq_factor=1.0"),
        (
            {"low_freq_factor": 0},
            "high_freq_factor: must be above low_freq_factor=0.0, and that above 0",
        ),
        (
            {"original_max_position_embeddings": -1},
            "original_max_position_embeddings: must be from 1",
        ),
        (
            {"original_max_position_embeddings": 10**400},
            "original_max_position_embeddings: must be a finite number",
        ),
        ({"factor": 10**400}, "factor: must be a finite number"),
    ],
)
def test_llama3_scaling_that_is_refused(changes, message, copy):
    folder = copy("llama")
    change(folder / "config.json", "rope_parameters", **changes)
    refused(folder, message)


@pytest.mark.parametrize(
    ("name", "key"), [("mistral", "num_key_value_heads"), ("qwen3", "head_dim")]
)
def test_keys_whose_defaults_differ_by_class_must_be_there(name, key, copy):
    folder = copy(name)
    change(folder / "config.json", **{key: None})
    refused(folder, f"config.json: {key}: is missing, expected an integer")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "JSON: is malformed: Expecting value"),
        (b"\xff\xfe{}", "JSON: is malformed: 'utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, "JSON: is nested too deeply"),
        (b'{"a": 1, "a": 2}', "JSON: is malformed: key 'a' appears twice"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "JSON: is malformed: Exceeds the limit"),
        (b"[]", "JSON: must be an object, not an array"),
        (b"null", "JSON: must be an object, not null"),
    ],
)
@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_json_that_is_refused(data, message, file, copy):
    folder = copy("llama")
    (folder / file).write_bytes(data)
    assert refused(folder, message).file == str(folder / file)


def test_json_is_read_with_a_bound(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('"' + "x" * 98 + '"')
    assert json_fields.read(path, 100) == "x" * 98
    with pytest.raises(jq.CheckpointError, match="a.json: size: must be at most 99 bytes"):
        json_fields.read(path, 99)
    with pytest.raises(jq.CheckpointError, match="path: must be a regular file"):
        json_fields.read(tmp_path, 99)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(jq.CheckpointError, match="path: must be a regular file"):
        json_fields.read(tmp_path / "pipe", 99)


def test_the_chat_template_of_its_own_file_counts(copy):
    folder = copy("qwen2")
    change(folder / "tokenizer_config.json", chat_template="other")
    assert (
        models.from_pretrained(folder).tokenizer.chat_template
        == loaded("qwen2").tokenizer.chat_template
        != "other"
    )


def test_further_chat_templates_are_files_in_a_folder(copy):
    folder = copy("qwen2")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    found = models.from_pretrained(folder).tokenizer.chat_templates
    assert found == {"default": loaded("qwen2").tokenizer.chat_template, "rag": "R"}
    (folder / "additional_chat_templates" / "rag.jinja").write_bytes(b"\xff")
    refused(folder, "additional_chat_templates/rag.jinja: text: expected UTF-8")


def test_chat_templates_that_are_refused(copy):
    folder = copy("qwen2")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    refused(folder, "chat_template.jinja: text: expected UTF-8")
    (folder / "chat_template.jinja").write_bytes(b" " * ((1 << 20) + 1))
    refused(folder, "chat_template.jinja: size: must be at most 1048576 bytes")
    (folder / "chat_template.jinja").unlink()
    os.mkfifo(folder / "chat_template.jinja")  # nobody writes to it
    refused(folder, "chat_template.jinja: path: must be a regular file")


@pytest.mark.slow("converts and compiles models")
def test_safetensors_files_that_end_early(copy):
    folder = copy("qwen2")
    file = folder / "model.safetensors"
    data = file.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    for size in [*range(0, start + 40, 3), *range(start, len(data), 4999), len(data) - 1]:
        file.write_bytes(data[:size])
        refused(folder, "model.safetensors: header: safetensors rejects it: ")


@pytest.mark.slow("reads hundreds of damaged files")
def test_damaged_safetensors_files(copy):
    """Each of 400 damaged headers is refused, or describes readable tensors."""
    folder, rng = copy("qwen2"), np.random.default_rng(3)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    wrong = 0
    for _ in range(400):
        changed = bytearray(data)
        for at in rng.integers(0, start, rng.integers(1, 4)):
            changed[at] = rng.integers(256)
        file.write_bytes(changed)
        try:
            with models.CheckpointSource(folder) as source:
                got = {name: source.read(name) for name in source.tensors}
        except jq.CheckpointError as error:
            assert str(folder) in error.file and error.field and error.problem
            wrong += 1
        else:
            assert all(np.isfinite(tensor).all() for tensor in got.values())
    assert wrong > 300


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer_config.json", "generation_config.json", INDEX]
)
def test_damaged_json(file, copy):
    """Each of 150 files is refused by name, or describes a consistent checkpoint."""
    folder, rng = copy("qwen3" if file == INDEX else "llama"), np.random.default_rng(2)
    original, wrong = (folder / file).read_text(), 0
    for _ in range(150):
        content = json.loads(original)
        damaged(content, rng)
        (folder / file).write_text(json.dumps(content))
        try:
            with models.CheckpointSource(folder) as source:
                metadata = source.metadata
        except jq.CheckpointError as error:
            assert str(folder) in error.file and error.field and error.problem
            wrong += 1
        else:
            models.Config.from_metadata(metadata)
            if source.tokenizer is not None:
                assert models.tokenizer.from_metadata(metadata).vocab_size == 344
                assert source.tokenizer.vocab_size == 344
    assert wrong > 10


def test_tensors_that_do_not_fit(copy):
    folder = copy("qwen2")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"

    def refuse(changes, message):
        save_file(
            {key: value for key, value in (tensors | changes).items() if value is not None}, file
        )
        assert refused(folder, message).field == f"tensor {next(iter(changes))!r}"

    refuse({name: None}, r"is missing, expected with shape \(32, 32\)")
    refuse(
        {name: np.zeros((32, 31), np.float16)},
        r"model.safetensors: .*has shape \(32, 31\), expected \(32, 32\)",
    )
    refuse(
        {name: np.zeros((32, 32), np.int8)},
        "has dtype I8, which is not supported; supported: F32, F16, BF16",
    )
    refuse({name: np.full((32, 32), 1e39)}, "element 0 is NaN or infinite")
    refuse(
        {"model.rotary_emb.inv_freq_2": np.zeros(16, np.float32)}, "is not part of a qwen2 model"
    )
    refuse(
        {"model.layers.2.mlp.up_proj.weight": tensors[name]},
        "is not part of a qwen2 model as config.json",
    )
    for value in (np.nan, np.inf, -np.inf):
        broken = tensors[name].copy()
        broken[3, 4] = value
        refuse({name: broken}, "model.safetensors: .*element 100 is NaN or infinite")
        bias = np.zeros(32, np.float16)
        bias[5] = value
        refuse({"model.layers.0.self_attn.q_proj.bias": bias}, "element 5 is NaN or infinite")


def test_a_class_without_a_head(copy):
    """Names lack "model.", and there is no lm_head, as in folders for embeddings."""
    folder = copy("llama")
    change(folder / "config.json", architectures=["LlamaModel"])
    file = folder / "model.safetensors"
    tensors = {name.removeprefix("model."): t for name, t in load_file(file).items()}
    del tensors["lm_head.weight"]
    save_file(tensors, file)
    with pytest.warns(UserWarning, match="has no lm_head.weight, and generates with its embedding"):
        got = models.from_pretrained(folder)
    assert "output.weight" not in models.named_tensors(got)
    ids = [[1, 5, 7]]
    np.testing.assert_array_equal(models.embed(got, ids), models.embed(loaded("llama"), ids))


@pytest.mark.parametrize(
    "name", ["k_scale", "k_proj.k_scale", "v_proj.output_scale", "attn.q_scale", "kv_scale"]
)
def test_scales_of_caches_are_skipped(name, copy):
    folder = copy("llama")
    file = folder / "model.safetensors"
    scale = {f"model.layers.0.self_attn.{name}": np.ones(1, np.float32)}
    save_file(load_file(file) | scale, file)
    with pytest.warns(UserWarning, match="1 tensors are skipped.*: scales of FP8 caches"):
        assert "output.weight" in models.CheckpointSource(folder).tensors


def test_float64_tensors_are_read_as_float32(copy):
    folder = copy("qwen2")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name: values.astype(np.float64) for name, values in tensors.items()}, file)
    with models.CheckpointSource(FOLDERS / "qwen2") as want, models.CheckpointSource(folder) as got:
        for name in want.tensors:
            read = got.read(name)
            assert read.dtype == np.float32
            np.testing.assert_array_equal(read, np.asarray(want.read(name), np.float32))


def test_float8_weights_are_refused_by_name(copy):
    folder = copy("qwen2")
    data = (folder / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    entry = header["model.layers.0.mlp.up_proj.weight"]
    entry["dtype"], entry["shape"] = "F8_E4M3", [32, 64]
    encoded = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(encoded)) + encoded + data[8 + size :]
    )
    refused(folder, "has dtype F8_E4M3, which is not supported")


def test_a_file_that_shrinks_while_it_is_read(copy):
    folder = copy("qwen2")
    with models.CheckpointSource(folder) as source:
        os.truncate(folder / "model.safetensors", 6000)
        with pytest.raises(
            jq.CheckpointError, match="model.safetensors: header: safetensors rejects it"
        ):
            source.read("blk.1.ffn_up.weight")
    folder = copy("qwen3")
    with models.CheckpointSource(folder) as source:
        source.read("token_embd.weight")  # the file stays open
        os.truncate(folder / "model-00001-of-00002.safetensors", 4000)
        with pytest.raises(
            jq.CheckpointError, match=r"tensor 'model\.\S+': safetensors rejects it"
        ):
            for name in source.tensors:
                source.read(name)


def test_a_file_that_changes_before_it_is_read(copy):
    folder = copy("qwen2")
    file = folder / "model.safetensors"
    name = "model.norm.weight"
    with models.CheckpointSource(folder) as source:
        save_file(load_file(file) | {name: np.ones(16, np.float16)}, file)
        with pytest.raises(jq.CheckpointError, match=f"tensor '{name}': changed while"):
            source.read("output_norm.weight")


@pytest.mark.parametrize(
    "shard",
    ["../model-00001-of-00002.safetensors", "/etc/passwd", "..", "", "a/b.safetensors", 3, None],
)
def test_indices_that_leave_the_folder(shard, copy):
    folder = copy("qwen3")
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"]["lm_head.weight"] = shard
    (folder / INDEX).write_text(json.dumps(content))
    refused(
        folder,
        r"index.json: weight_map\['lm_head.weight'\]: must name a .safetensors file in its folder",
    )


def test_indices_that_do_not_say_what_is_there(copy):
    folder = copy("qwen3")
    sound = json.loads((folder / INDEX).read_text())
    first, second = sorted(set(sound["weight_map"].values()))

    def refuse(weight_map, message):
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        refused(folder, message)

    places = sound["weight_map"]
    swapped = {first: second, second: first}
    refuse([], "weight_map: must be an object")
    refuse({}, r"tensor 'model.embed_tokens.weight': is missing, expected with shape \(64, 32\)")
    refuse(
        places | {"lm_head.weight": "gone.safetensors"},
        "weight_map: names 'gone.safetensors', which is missing",
    )
    refuse(
        places | {"lm_head.weight": swapped[places["lm_head.weight"]]},
        r"weight_map\['lm_head.weight'\]: names",
    )
    refuse(
        places | {"extra": first},
        r"weight_map\['extra'\]: names '\S*', which does not hold the tensor",
    )
    refuse(
        {k: v for k, v in places.items() if k != "lm_head.weight"},
        "'lm_head.weight': is not in model.safetensors.i",
    )
    (folder / INDEX).write_text(json.dumps(sound))
    for name in (first, second):
        save_file(load_file(folder / first) | load_file(folder / second), folder / name)
    refused(folder, "tensor '.*': is also in model-0000[12]-of-00002.safetensors")


def test_folders_that_hold_no_checkpoint(copy, tmp_path):
    with pytest.raises(FileNotFoundError):
        models.from_pretrained(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        models.from_pretrained(tmp_path)
    folder = copy("mistral")
    (folder / "tokenizer.model").write_bytes(b"")
    refused(folder, "tokenizer.json: is missing; tokenizer.model alone is not supported")
    (folder / "tokenizer.model").unlink()
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    refused(folder, "model.safetensors: path: must be a regular file")


def test_heads_by_default(copy):
    """Defaults of num_key_value_heads and head_dim, which early Llama files omit."""
    folder = copy("mistral")
    change(
        folder / "config.json",
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        num_key_value_heads=None,
        head_dim=None,
    )
    got = models.from_pretrained(folder).config
    # Llama has no sliding window
    assert (got.num_kv_heads, got.head_dim, got.context_length) == (
        1,
        32,
        256,
    )


def test_quantized_from_one_file_of_the_folder(tmp_path):
    for source in ("qwen2", "qwen2/model.safetensors"):
        models.quantize_file(FOLDERS / source, tmp_path / f"{len(source)}.gguf", "Q8_0")
    first, second = (file.read_bytes() for file in tmp_path.iterdir())
    assert first == second


def test_quantized_from_the_folder_and_from_memory(tmp_path):
    for name in ("llama", "qwen3"):
        file = tmp_path / f"{name}.gguf"
        models.quantize_file(FOLDERS / name, file, "Q8_0")
        got, want = jq.gguf.read(file), models.named_tensors(models.quantize(loaded(name), "Q8_0"))
        assert got.tensors.keys() == want.keys()
        for key, tensor in got.tensors.items():
            if isinstance(tensor, jq.QuantizedArray):
                assert tensor.to_gguf_bytes() == want[key].to_gguf_bytes()
            else:
                assert np.array_equal(tensor, want[key])
        with np.load(FOLDERS / name / "expected.npz") as expected:
            assert (
                nmse(models.from_gguf(file).logits(expected["tokens"][None])[0], expected["logits"])
                <= 1e-3
            )
