"""Checkpoints of further architectures, as transformers writes them, with golden weights.

tests/data/checkpoints/transformers.json has config.json and the tensors' names and shapes from
transformers. With the weights of these folders transformers computes the golden logits, too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re

import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import needs_native
from support.paths import GOLDEN, TESTS

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.architectures import ARCHITECTURES
from jax_q4k.models.files.checkpoints import config_json
from jax_q4k.models.support import json_fields

from ... import checkpoints
from ...golden_files import model, reference

pytestmark = needs_native

CASES = json.loads((GOLDEN.parent / "checkpoints" / "transformers.json").read_text())
#: Config fields in golden files that the models ignore.
UNUSED = {"gpt-oss": ["intermediate_size"], "phi3-long": ["window"], "phi3-short": ["window"]}
VISION = "ignore:1 tensors are skipped, which text generation does not use. images"


def describe(config: dict) -> config_json.Description:
    return config_json.describe(json_fields.JSONFields(config, "config.json"))


@functools.cache
def weights(name: str) -> dict[str, np.ndarray]:
    """A golden model's weights, with the names of the decoder's class."""
    described = describe(CASES[name]["config"])
    tensors = models.named_tensors(model(name))
    arrays = {key: checkpoints.decoded(tensor) for key, tensor in tensors.items()}
    return checkpoints.stored(arrays, described.config, described.checkpoint)


def in_the_checkpoint(name: str) -> dict[str, np.ndarray]:
    """The weights with the names that transformers 5 gives them; image parts are zero."""
    shapes = CASES[name]["tensors"]
    inner = "language_model." if any("language_model" in key for key in shapes) else ""
    tensors = {}
    for key, array in weights(name).items():
        stored = key if key.startswith("lm_head") else key.replace("model.", f"model.{inner}", 1)
        as_written = list(array.shape) == shapes[stored]
        tensors[stored] = array if as_written else array.swapaxes(1, 2).copy()
    others = shapes.keys() - tensors.keys()
    assert all("visual" in other for other in others), others
    return tensors | {other: np.zeros(shapes[other], np.float32) for other in others}


@pytest.fixture(autouse=True)
def exact():
    with jq.implementation("native", activations="f32"):
        yield


@pytest.mark.slow("converts and compiles models", quick=["mistral3"])
@pytest.mark.filterwarnings(VISION)
@pytest.mark.parametrize("name", CASES)
def test_the_golden_logits(name, tmp_path):
    """Checks logits of the checkpoint and of its saved file, and the tensors' names and shapes."""
    tensors = in_the_checkpoint(name)
    assert {key: list(array.shape) for key, array in tensors.items()} == CASES[name]["tensors"]
    assert not any(np.isnan(array).any() for array in tensors.values())
    folder = checkpoints.write(tmp_path / "model", CASES[name]["config"], tensors)
    got, want = models.from_pretrained(folder), reference(name)
    unused = {key: getattr(model(name).config, key) for key in UNUSED.get(name, ())}
    assert dataclasses.replace(got.config, **unused) == model(name).config
    logits = got.logits(want.tokens[None])
    assert nmse(logits[0], want.logits) <= 1e-8
    models.save_gguf(got, tmp_path / "model.gguf")
    again = models.from_gguf(tmp_path / "model.gguf")
    assert again.config == got.config
    np.testing.assert_array_equal(again.logits(want.tokens[None]), logits)


def test_the_page_of_models_names_every_class():
    page = (TESTS.parent / "docs/models.md").read_text().partition("Folders of transformers")[2]
    listed = re.findall(r"`(\w+)`", page.partition("\n\n")[0])
    classes = {c.name for kind in ARCHITECTURES.values() for c in kind.checkpoints}
    assert set(listed) - {"architectures"} == classes


def refused(folder, message: str) -> None:
    with pytest.raises(jq.CheckpointError, match=message):
        models.CheckpointSource(folder)


def test_experts_that_are_packed(tmp_path):
    """MXFP4 as gpt-oss is released: blocks and scales, with rows of gate and up interleaved."""
    tensors, config = in_the_checkpoint("gpt-oss"), dict(CASES["gpt-oss"]["config"])
    rng, decoded = np.random.default_rng(0), {}
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2) * np.repeat([1, -1], 8)
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, k, n = tensors.pop(key).shape
        blocks = rng.integers(0, 256, (experts, n, k // 32, 16), np.uint8)
        scales = rng.integers(120, 130, (experts, n, k // 32), np.uint8)
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        halves = np.stack([values[blocks % 16], values[blocks // 16]], axis=-1)
        scaled = halves.reshape(*scales.shape, 32) * 2.0 ** (scales[..., None] - 127.0)
        decoded[key] = scaled.reshape(experts, n, k)
    config["quantization_config"] = {"quant_method": "mxfp4"}
    folder = checkpoints.write(tmp_path / "model", config, tensors)
    models.save_gguf(models.from_pretrained(folder), tmp_path / "model.gguf")
    got = jq.gguf.read(tmp_path / "model.gguf").tensors
    both, down = (decoded[f"model.layers.1.mlp.experts.{n}_proj"] for n in ("gate_up", "down"))
    for part, want in (("gate", both[:, ::2]), ("up", both[:, 1::2]), ("down", down)):
        packed = got[f"blk.1.ffn_{part}_exps.weight"]
        assert packed.format == "MXFP4"
        np.testing.assert_array_equal(packed.dequantize(), want)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[f"{name}_scales"] = tensors[f"{name}_scales"][:, :, :1]
    refused(checkpoints.write(folder, config, tensors), rf"{name}_scales': has shape \(8, 256, 1\)")
    tensors[f"{name}_scales"] = np.zeros((8, 256, 2), np.float32)
    refused(checkpoints.write(folder, config, tensors), f"{name}_scales': has dtype F32")
    del config["quantization_config"]
    refused(checkpoints.write(folder, config, tensors), "experts.gate_up_proj': is missing")


def test_experts_that_transformers_4_transposed(tmp_path):
    tensors = in_the_checkpoint("qwen3vlmoe")
    early = {
        key: array.swapaxes(1, 2).copy() if ".experts." in key else array
        for key, array in tensors.items()
    }
    config = CASES["qwen3vlmoe"]["config"]
    folder = checkpoints.write(tmp_path / "model", config, early)
    with pytest.warns(UserWarning, match="1 tensors are skipped, .*: images"):
        source = models.CheckpointSource(folder)
    gate_up = tensors["model.language_model.layers.1.mlp.experts.gate_up_proj"]
    with source:
        np.testing.assert_array_equal(source.read("blk.1.ffn_gate_exps.weight"), gate_up[:, :64])
        np.testing.assert_array_equal(source.read("blk.1.ffn_up_exps.weight"), gate_up[:, 64:])


def test_layers_that_predict_further_tokens_are_skipped(tmp_path):
    tensors, config = in_the_checkpoint("glm4moe"), CASES["glm4moe"]["config"]
    further = {"model.layers.3.eh_proj.weight": np.zeros((2, 4), np.float32)}
    folder = checkpoints.write(tmp_path / "model", config, tensors | further)
    with pytest.warns(UserWarning, match="1 tensors are skipped, .*: further tokens"):
        assert models.CheckpointSource(folder).config.num_layers == 3
    checkpoints.write(folder, config | {"num_nextn_predict_layers": 0}, tensors | further)
    refused(folder, "layers.3.eh_proj.weight': is not part of a glm4moe model")


def test_experts_that_do_not_fit(tmp_path):
    tensors, config = in_the_checkpoint("qwen3moe"), CASES["qwen3moe"]["config"]
    name = "model.layers.0.mlp.experts.15.up_proj.weight"
    folder = tmp_path / "model"
    cut = tensors | {name: tensors[name][:32]}
    refused(checkpoints.write(folder, config, cut), rf"{name}': has shape \(32, 256\)")
    half = tensors | {name: tensors[name].astype(np.float16)}
    refused(checkpoints.write(folder, config, half), f"{name}': has dtype F16, but '.*' has F32")
    less = {key: array for key, array in tensors.items() if key != name}
    refused(checkpoints.write(folder, config, less), f"{name}': is missing")
    broken = tensors | {name: np.full_like(tensors[name], np.nan)}
    with models.CheckpointSource(checkpoints.write(folder, config, broken)) as source:
        with pytest.raises(jq.CheckpointError, match=f"{name}': element 0 is NaN"):
            source.read("blk.0.ffn_up_exps.weight")


def changed(name: str, changes: dict, rope: dict | None = None) -> dict:
    """A case's config.json with changes to it and to its rope_parameters; None removes a key."""
    config = CASES[name]["config"] | changes
    if rope is not None:
        config["rope_parameters"] = CASES[name]["config"]["rope_parameters"] | rope
    return {key: value for key, value in config.items() if value is not None}


def test_values_that_classes_imply():
    """Magnitudes and windows follow transformers, with keys that early files omit."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert describe(changed("granite", {}, scaling)).config.yarn == (32.0, 1.0, 0.0)
    assert describe(changed("granite", {}, scaling)).config.rope_magnitude == 1.0
    given = describe(changed("granite", {}, scaling | {"attention_factor": 1.0})).config
    assert given.rope_magnitude == pytest.approx(1 / (1 + 0.1 * np.log(4)))
    long = {"attention_factor": None, "rope_type": "su"}
    phi = describe(changed("phi3-short", {"sliding_window": 64}, long)).config
    assert phi.rope_magnitude == pytest.approx(np.sqrt(1 + np.log(2048 / 512) / np.log(512)))
    assert [phi.window_of(layer) for layer in range(2)] == [64, 64]
    early = {"rope_parameters": None, "rope_theta": 1e4, "attention_bias": None}
    glm = describe(changed("glm4", early))
    assert (glm.config.rope_dim, glm.biases) == (32, ("qkv",))


@pytest.mark.parametrize(
    ("name", "changes", "rope", "message"),
    [
        ("qwen3moe", {"mlp_only_layers": [1]}, None, "mlp_only_layers: is "),
        ("qwen3moe", {"num_local_experts": None}, None, "num_experts: is missing"),
        ("glm4moe", {"scoring_func": "softmax"}, None, "scoring_func: is 'softmax'"),
        ("gpt-oss", {"swiglu_limit": 5.0}, None, "swiglu_limit: is 5.0"),
        ("granite", {"residual_multiplier": 0}, None, "residual_multiplier: must not be 0"),
        ("phi3-short", {}, {"long_factor": [1.0]}, "long_factor: must be 24 numbers above"),
        ("phi3-short", {}, {"short_factor": [0] * 24}, "short_factor: must be 24 numbers above"),
        ("phi3-short", {}, {"short_factor": [1e-6] * 24}, "must be 24 numbers above 1e-06"),
        ("phi3", {}, {"partial_rotary_factor": 0}, "partial_rotary_factor: must be above 0"),
        ("mistral3", {}, {"factor": -1}, "factor: must be a number above"),
        ("granite", {}, {"llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta: is not supported"),
    ],
)
def test_configs_that_are_refused(name, changes, rope, message):
    with pytest.raises(jq.CheckpointError, match=message):
        describe(changed(name, changes, rope))


def test_sections_that_do_not_add_up():
    config = json.loads(json.dumps(CASES["qwen2vl"]["config"]))
    config["text_config"]["rope_parameters"]["mrope_section"] = [8, 12, 13]
    with pytest.raises(jq.CheckpointError, match="mrope_section: must be 3 counts of pairs, 32"):
        describe(config)
    config["text_config"]["rope_parameters"]["mrope_section"] = [8, 12, 12]
    flat = config.pop("text_config")  # early Qwen 2 VL files are flat
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": [10, 11, 11]}
    flat["rope_theta"] = flat.pop("rope_parameters")["rope_theta"]
    sections = describe(flat | config).metadata["qwen2vl.rope.dimension_sections"]
    assert sections.tolist() == [10, 11, 11, 0]
