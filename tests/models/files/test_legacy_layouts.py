"""Legacy layouts: files of older converters with tensors that are split today."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import needs_native

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.files.quantizing import quantize

from .. import golden_files

#: Current keys of DeepSeek's head sizes; legacy files use `key_length` and `value_length`.
TODAY = "key_length_mla", "value_length_mla"


def as_earlier(name: str, path: Path, type: str | None = None) -> Path:
    """Writes a golden file like an older converter.

    type: format of the tensors that are split today; they are float32 if it is None.
    """
    file = jq.gguf.read(golden_files.path(name))
    metadata, tensors = dict(file.metadata), dict(file.tensors)
    config = models.from_gguf(golden_files.path(name)).config
    for layer in range(config.num_layers):
        prefix = f"blk.{layer}."
        if config.latent is not None:
            whole, rows = "attn_kv_b", of_latent(config, tensors, prefix)
        elif config.mixer_of(layer) == "delta":
            whole, rows = "ssm_in", of_delta(config, tensors, prefix)
        else:
            continue
        tensors[f"{prefix}{whole}.weight"] = rows if type is None else jq.quantize(rows, type)
    if config.latent is not None:
        prefix = f"{config.architecture}.attention."
        of_heads = [metadata.pop(f"{prefix}{key}") for key in TODAY]
        for key, value in zip(("key_length", "value_length"), of_heads, strict=True):
            metadata[f"{prefix}{key}"] = value
        metadata[f"{prefix}head_count_kv"] = config.num_heads
    jq.gguf.write(path, metadata, {n: jq.gguf.TensorPieces.of(n, t) for n, t in tensors.items()})
    return path


def floats(tensor: object) -> np.ndarray:
    return np.asarray(tensor.dequantize() if jq.is_quantized(tensor) else tensor, np.float32)


def of_latent(config, tensors, prefix) -> jax.Array:
    """Concatenates rows of keys, then of values, head by head."""
    key, value = (floats(tensors.pop(f"{prefix}attn_{part}_b.weight")) for part in "kv")
    heads = [np.concatenate([k.T, v]) for k, v in zip(key, value, strict=True)]
    return jnp.asarray(np.concatenate(heads))


def of_delta(config, tensors, prefix) -> jax.Array:
    """Concatenates rows of query, key, values and their gates for each key head."""
    delta = config.delta
    qkv, gate = (floats(tensors.pop(f"{prefix}attn_{part}.weight")) for part in ("qkv", "gate"))
    parts = [*np.split(qkv, (delta.keys, 2 * delta.keys)), gate]
    of_heads = [np.split(part, delta.key_heads) for part in parts]
    return jnp.asarray(
        np.concatenate([np.concatenate(head) for head in zip(*of_heads, strict=True)])
    )


@pytest.mark.slow("compiles each model twice", quick=["qwen3next"])
@needs_native
@pytest.mark.parametrize("name", ["deepseek2", "deepseek2-lite", "qwen3next"])
def test_logits_are_those_of_todays_file(name, tmp_path):
    model, reference = (
        models.from_gguf(as_earlier(name, tmp_path / "f.gguf")),
        golden_files.reference(name),
    )
    with jq.implementation("native", activations="f32"):
        logits = model.logits(reference.prompt[None])[0]
    assert nmse(logits, reference.logits[: len(logits)]) <= 1e-8


@pytest.mark.slow("compiles several programs", quick=["deepseek2-Q8_0"])
@needs_native
@pytest.mark.parametrize(("name", "type"), [("deepseek2", "Q8_0"), ("qwen3next", "Q4_K")])
def test_packed_tensors_and_saved_files(name, type, tmp_path):
    """Blocks are split between heads, and the saved file has the current layout."""
    earlier = models.from_gguf(as_earlier(name, tmp_path / "packed.gguf", type))
    wholes = jq.gguf.read(tmp_path / "packed.gguf").tensors
    rounded = {n: floats(t) for n, t in wholes.items() if "attn_kv_b" in n or "ssm_in" in n}
    assert rounded
    models.save_gguf(earlier, tmp_path / "today.gguf")
    today = models.from_gguf(tmp_path / "today.gguf")
    assert today.config == earlier.config
    tensors = jq.gguf.read(tmp_path / "today.gguf").tensors
    again = {n: jnp.asarray(w) for n, w in rounded.items()}
    for layer in range(today.config.num_layers):
        prefix = f"blk.{layer}."
        if today.config.latent is not None:
            rows = of_latent(today.config, dict(tensors), prefix)
            np.testing.assert_array_equal(rows, again[f"{prefix}attn_kv_b.weight"])
        elif today.config.mixer_of(layer) == "delta":
            rows = of_delta(today.config, dict(tensors), prefix)
            np.testing.assert_array_equal(rows, again[f"{prefix}ssm_in.weight"])
            assert tensors[f"{prefix}attn_qkv.weight"].format == type
    tokens = golden_files.reference(name).prompt[None, :16]
    np.testing.assert_array_equal(earlier.logits(tokens), today.logits(tokens))


@pytest.mark.slow("compiles several programs")
def test_over_devices(tmp_path):
    """Tensors that are split while loading get the sharding of the current ones."""
    path = as_earlier("qwen3next", tmp_path / "earlier.gguf", "Q4_K")
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2])
    model, alone = models.load(path, mesh=mesh), models.load(path)
    assert model.placement.tensors["blk.0.attn_qkv.weight"].mesh == mesh
    assert all(len(weight.sharding.device_set) == 2 for weight in model.weights)
    tokens = golden_files.reference("qwen3next").prompt[None, :16]
    with jq.implementation(activations="f32"):
        assert nmse(model.logits(tokens), alone.logits(tokens)) <= 1e-10


@pytest.mark.parametrize("name", ["deepseek2", "qwen3next"])
def test_quantized_to_a_file(name, tmp_path):
    source = as_earlier(name, tmp_path / "source.gguf")
    quantize.quantize_file(source, tmp_path / "small.gguf", "Q8_0")
    models.save_gguf(models.quantize(models.from_gguf(source), "Q8_0"), tmp_path / "saved.gguf")
    got, want = (jq.gguf.read(tmp_path / file) for file in ("small.gguf", "saved.gguf"))
    assert got.metadata == want.metadata
    today = jq.gguf.read_header(golden_files.path(name)).metadata
    assert {key: got.metadata.get(key) for key in today if ".attention." in key}.items() <= (
        today.items()
    )
    assert got.tensors.keys() == want.tensors.keys()
    for tensor, other in ((got.tensors[n], want.tensors[n]) for n in got.tensors):
        assert jax.tree.structure(tensor) == jax.tree.structure(other)
        jax.tree.map(np.testing.assert_array_equal, tensor, other)


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("deepseek2", {"attention.head_count_kv": 2}, r"head_count_kv.*is 2, expected 4"),
        ("deepseek2", {"attention.value_length": 32}, r"attn_kv_b.*has shape .*, expected "),
        ("qwen3next", {"ssm.group_count": 1}, r"has shape .*, expected "),
    ],
)
def test_files_that_do_not_fit_are_refused(name, change, problem, tmp_path):
    path = as_earlier(name, tmp_path / "earlier.gguf")
    file = jq.gguf.read(path)
    metadata = dict(file.metadata) | {
        f"{file.metadata['general.architecture']}.{key}": value for key, value in change.items()
    }
    pieces = {n: jq.gguf.TensorPieces.of(n, t) for n, t in file.tensors.items()}
    jq.gguf.write(tmp_path / "bad.gguf", metadata, pieces)
    with pytest.raises(jq.GGUFError, match=problem):
        models.from_gguf(tmp_path / "bad.gguf")


def test_a_tensor_beside_its_parts_is_refused(tmp_path):
    path = as_earlier("qwen3next", tmp_path / "earlier.gguf")
    file, today = jq.gguf.read(path), jq.gguf.read(golden_files.path("qwen3next")).tensors
    name = next(n for n in today if n.endswith("attn_gate.weight"))
    pieces = {
        n: jq.gguf.TensorPieces.of(n, t) for n, t in (file.tensors | {name: today[name]}).items()
    }
    jq.gguf.write(tmp_path / "bad.gguf", file.metadata, pieces)
    with pytest.raises(jq.GGUFError, match=r"ssm_in.weight': is present in addition to 'blk"):
        models.from_gguf(tmp_path / "bad.gguf")
