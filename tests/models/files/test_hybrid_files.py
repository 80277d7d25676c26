"""Files of hybrids, Gemma 4 and latent attention: saved, and quantized like llama.cpp."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import needs_native

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import cli
from jax_q4k.models.config.tensors import unused_tensors
from jax_q4k.models.network.build import build

from ..golden_files import model, path, reference

pytestmark = needs_native

NAMES = (
    "lfm2",
    "lfm2moe",
    "qwen35",
    "qwen35-long",
    "qwen35-mtp",
    "qwen35moe",
    "qwen3next",
    "gemma4",
    "gemma4-e",
    "gemma4-moe",
    "deepseek2",
    "deepseek2-lite",
    "deepseek2-noyarn",
)
SKIPPED = "ignore:.* tensors are skipped, which text generation does not use"


@pytest.fixture(autouse=True)
def exact():
    with jq.implementation("native", activations="f32"):
        yield


def used(name: str) -> dict:
    """Tensors of a golden file, without those that text generation does not use."""
    file = jq.gguf.read(path(name))
    unused = unused_tensors(file.metadata, file.tensors)
    return {key: tensor for key, tensor in file.tensors.items() if key not in unused}


def check_equal(got: dict, want: dict) -> None:
    """Checks that both have the same tensor names and bytes."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert jq.is_quantized(got[name]) == jq.is_quantized(tensor), name
        leaves = jax.tree.leaves(got[name]), jax.tree.leaves(tensor)
        for a, b in zip(*leaves, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def types(file) -> dict[str, str]:
    return {name: info.type.name for name, info in jq.gguf.read_header(file).tensors.items()}


@pytest.mark.slow("converts and compiles models", quick=["deepseek2-noyarn"])
@pytest.mark.filterwarnings(SKIPPED)
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_file_is_the_one_that_was_loaded(name, tmp_path):
    loaded = model(name)
    models.save_gguf(loaded, tmp_path / "model.gguf")
    check_equal(jq.gguf.read(tmp_path / "model.gguf").tensors, used(name))
    again = models.from_gguf(tmp_path / "model.gguf")
    assert again.config == loaded.config
    assert again.metadata.keys() == loaded.metadata.keys()
    for key, value in loaded.metadata.items():
        np.testing.assert_array_equal(again.metadata[key], value)
    tokens = reference(name).prompt[None]
    np.testing.assert_array_equal(again.logits(tokens), loaded.logits(tokens))


@pytest.mark.slow("saves and reads each model", quick=["*deepseek2-noyarn*", "*lfm2*"])
@pytest.mark.filterwarnings(SKIPPED)
@pytest.mark.parametrize("name", NAMES)
def test_types_and_bytes_of_llama_cpp_stay(name, tmp_path):
    """Requantizing with the file's own recipe changes nothing, for the file and the model.

    llama-quantize counts the multi-token-prediction layers, so without them the types of the last
    layers differ.
    """
    want = used(name)
    files = [tmp_path / "file.gguf", tmp_path / "model.gguf"]
    models.quantize_file(path(name), files[0], "Q4_K_M")
    models.save_gguf(models.quantize(model(name), "Q4_K_M"), files[1])
    got = jq.gguf.read(files[0]).tensors
    assert types(files[0]) == types(files[1])
    if name == "qwen35-mtp":
        changed = {f"blk.1.{part}.weight" for part in ("attn_v", "ffn_down")}
        assert {got.pop(tensor).format for tensor in sorted(changed)} == {"Q6_K"}
        want = {key: tensor for key, tensor in want.items() if key not in changed}
    check_equal(got, want)


@pytest.mark.slow("converts and compiles models", quick=["deepseek2"])
@pytest.mark.parametrize("name", ["qwen35moe", "gemma4-moe", "gemma4-e", "deepseek2", "lfm2moe"])
def test_eight_bits_change_little(name, tmp_path):
    """Checks the median over tokens: a near tie of a router may give one of them another expert."""
    tokens = reference(name).prompt[None]
    models.quantize_file(path(name), tmp_path / "model.gguf", "Q8_0")
    got, want = (
        m.logits(tokens)[0] for m in (models.from_gguf(tmp_path / "model.gguf"), model(name))
    )
    assert set(types(tmp_path / "model.gguf").values()) <= {"Q8_0", "F32", "BF16"}
    assert np.median([nmse(a, b) for a, b in zip(got, want, strict=True)]) <= 0.02


def test_tensors_that_are_never_quantized():
    """Short convolutions and routers stay F32; the projection of per-layer inputs stays BF16."""
    kept = {
        "qwen35": ("blk.0.ssm_conv1d.weight", "F32"),
        "lfm2": ("blk.0.shortconv.conv.weight", "F32"),
        "lfm2moe": ("blk.1.ffn_gate_inp.weight", "F32"),
        "gemma4-e": ("per_layer_model_proj.weight", "BF16"),
    }
    for name, (tensor, type) in kept.items():
        found = models.named_tensors(models.quantize(model(name), "Q8_0"))[tensor]
        assert str(found.dtype) == {"F32": "float32", "BF16": "bfloat16"}[type]


def test_gate_and_up_of_experts_of_several_types_stay_apart(tmp_path):
    tensors = models.named_tensors(model("gemma4-moe"))
    name = "blk.1.ffn_gate_exps.weight"
    changed = tensors | {name: tensors[name].dequantize()}
    mixed = models.Model(
        build(model("gemma4-moe").config, changed),
        metadata=model("gemma4-moe").metadata,
    )
    models.save_gguf(mixed, tmp_path / "model.gguf")
    found = types(tmp_path / "model.gguf")
    assert (found[name], found["blk.1.ffn_up_exps.weight"]) == ("F32", "Q4_K")
    assert found["blk.0.ffn_gate_up_exps.weight"] == "Q4_K"
    again = models.named_tensors(models.from_gguf(tmp_path / "model.gguf"))
    check_equal(again, changed)


@pytest.mark.parametrize("name", ["qwen35moe", "gemma4-moe"])
def test_the_command_quantizes_them(name, tmp_path, capsys):
    target = tmp_path / "out.gguf"
    assert cli.main(("quantize", str(path(name)), str(target), "--type", "Q4_K_M")) == 0
    assert types(target) == types(path(name))
    assert "->" in capsys.readouterr().err
