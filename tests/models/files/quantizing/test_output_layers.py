"""Choice of the output layer, from flags of config.json and the tensors in the files.

tests/data/checkpoints/tied.json and tied.npz hold the decisions and logits of transformers 5.24.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import needs_native
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.architectures import ARCHITECTURES
from jax_q4k.models.files.checkpoints import config_json
from jax_q4k.models.support import json_fields

from ... import checkpoints

pytestmark = needs_native

DATA = GOLDEN.parent / "checkpoints"
CASES = json.loads((DATA / "tied.json").read_text())
CLASSES = {
    checkpoint.name: checkpoint
    for architecture in ARCHITECTURES.values()
    if not architecture.bidirectional  # encoders have no output layer
    for checkpoint in architecture.checkpoints
}
FLAGS = {"None": None, "True": True, "False": False}
FOLDERS = [*CASES["folders"]]


@pytest.fixture(autouse=True)
def exact():
    with jq.implementation("native", activations="f32"):
        yield


def flags(top: str, text: str) -> dict:
    """The two flags as config.json has them; None omits a flag."""
    inner = {} if text == "None" else {"tie_word_embeddings": FLAGS[text]}
    outer = {} if top == "None" else {"tie_word_embeddings": FLAGS[top]}
    return {**outer, "text_config": inner}


@pytest.mark.parametrize("name", CASES["classes"])
def test_transformers_decisions(name):
    """Falls back to a true flag in text_config, like transformers 4, if config.json has no flag."""
    for case, tied in CASES["classes"][name].items():
        top, text = case.split("/")
        fields = json_fields.JSONFields(flags(top, text), "config.json")
        found = config_json.is_tied(fields, CLASSES[name])
        as_in_4 = (top, text) == ("None", "True") and CLASSES[name].text_config
        assert found == (tied or as_in_4), case


def test_every_class_has_a_decision():
    """Missing classes share a config class with a listed one.

    The exceptions are Qwen's and Gemma's, whose defaults were read in transformers' sources.
    """
    missing = {name: CLASSES[name].tied for name in CLASSES.keys() - CASES["classes"].keys()}
    assert missing == {
        "Gemma2ForCausalLM": True,
        "Gemma3ForCausalLM": True,
        "GraniteMoeForCausalLM": False,
        "MistralForCausalLM": False,
        "Qwen2ForCausalLM": False,
        "Qwen3ForCausalLM": False,
        "Qwen3ForSequenceClassification": False,
    }


def tensors(name: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        key: (rng.integers(-64, 65, shape) / np.float32(128)).astype(np.float32)
        for key, shape in CASES["folders"][name]["tensors"].items()
    }


def folder(tmp_path, name: str, held: dict[str, np.ndarray], top: str, text: str = "None"):
    described = CASES["folders"][name]["config"]
    changes = flags(top, text)
    inner = changes.pop("text_config")
    described = described | changes
    if "text_config" in described:
        described["text_config"] = described["text_config"] | inner
    return checkpoints.write(tmp_path / "model", described, held)


def error(path, name: str, expected: str) -> float:
    with np.load(DATA / "tied.npz") as want:
        logits = models.from_pretrained(path).logits(want["tokens"][None])[0]
        return nmse(logits, want[f"{name}.{expected}"])


def full_name(name: str, end: str) -> str:
    """The checkpoint's full name of a tensor; classes for images add prefixes."""
    return next(key for key in CASES["folders"][name]["tensors"] if key.endswith(end))


@pytest.mark.parametrize("top", FLAGS)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        (name, text)
        for name in FOLDERS
        for text in (FLAGS if "text_config" in CASES["folders"][name]["config"] else ["None"])
    ],
)
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings is set")
def test_a_head_that_differs_counts(name, top, text, tmp_path):
    assert error(folder(tmp_path, name, tensors(name), top, text), name, "head") <= 1e-11


@pytest.mark.parametrize("name", FOLDERS)
def test_missing_tensors(name, tmp_path):
    held = tensors(name)
    head, embedding = (full_name(name, end) for end in ("lm_head.weight", "embed_tokens.weight"))
    values = held.pop(head)
    assert error(folder(tmp_path, name, held, "True"), name, "embedding") <= 1e-11
    with pytest.raises(jq.CheckpointError, match=r"lm_head.weight': is missing.*tie_word"):
        models.CheckpointSource(folder(tmp_path, name, held, "False", "True"))
    held[head] = values
    del held[embedding]
    assert error(folder(tmp_path, name, held, "True"), name, "both") <= 1e-11
    with pytest.raises(jq.CheckpointError, match=r"embed_tokens.weight': is missing"):
        models.CheckpointSource(folder(tmp_path, name, held, "False"))


def test_tensors_of_a_class_without_a_head(tmp_path):
    """Names as `LlamaModel.save_pretrained` writes them, and some folders of `LlamaForCausalLM`."""
    name = "LlamaForCausalLM"
    held = {key.removeprefix("model."): values for key, values in tensors(name).items()}
    assert error(folder(tmp_path, name, held, "False"), name, "head") <= 1e-11
    del held["lm_head.weight"]
    path = folder(tmp_path, name, held, "True")
    assert error(path, name, "embedding") <= 1e-11
    described = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**described, "architectures": ["LlamaModel"]}))
    assert error(path, name, "embedding") <= 1e-11


def test_scales_of_fp8_caches_are_skipped(tmp_path):
    name, scale = "LlamaForCausalLM", np.ones((), np.float32)
    layer = "model.layers.0.self_attn."
    held = tensors(name) | {f"{layer}k_scale": scale, f"{layer}v_proj.v_scale": scale}
    with pytest.warns(UserWarning, match="2 tensors are skipped, .*: scales of FP8 caches"):
        assert error(folder(tmp_path, name, held, "False"), name, "head") <= 1e-11


def test_warnings_about_a_head(tmp_path):
    held = tensors("LlamaForCausalLM")
    path = folder(tmp_path, "LlamaForCausalLM", held, "True")
    with pytest.warns(UserWarning, match="'lm_head.weight' differs from 'model.embed_tokens"):
        source = models.CheckpointSource(path)
    assert "output.weight" in source.tensors
    held["lm_head.weight"] = held["model.embed_tokens.weight"].copy()
    source = models.CheckpointSource(folder(tmp_path, "LlamaForCausalLM", held, "True"))
    assert "output.weight" not in source.tensors
    held["lm_head.weight"] = held["lm_head.weight"].astype(np.float16)
    with pytest.warns(UserWarning, match="differs"):
        models.CheckpointSource(folder(tmp_path, "LlamaForCausalLM", held, "True"))
    held["lm_head.weight"] = held["lm_head.weight"][:40]
    with (
        pytest.warns(UserWarning, match="differs"),
        pytest.raises(jq.CheckpointError, match=r"lm_head.weight': has shape \(40, 64\)"),
    ):
        models.CheckpointSource(folder(tmp_path, "LlamaForCausalLM", held, "True"))
