import dataclasses
import os
import re

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGUFValueType as Value
from support.gguf_bytes import array_entry, entry, rewritten, u64

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import cli
from jax_q4k.models.network.build import build

from ..golden_files import NAMES, model, path


def contents(file):
    """Returns (metadata key -> (types, value), tensor name -> (type, shape, bytes)).

    The `gguf` package reads both.
    """
    reader = gguf.GGUFReader(file)
    fields = {
        key: f
        for key, f in reader.fields.items()
        if key not in ("GGUF.tensor_count", "GGUF.kv_count")
    }
    return (
        {key: (field.types, field.contents()) for key, field in fields.items()},
        {t.name: (t.tensor_type, t.shape.tolist(), t.data.tobytes()) for t in reader.tensors},
    )


def floats(name, dtype):
    """A golden model with float matrices."""
    tensors = {
        key: (tensor.dequantize(dtype) if isinstance(tensor, jq.QuantizedArray) else tensor)
        for key, tensor in models.named_tensors(model(name)).items()
    }
    return models.Model(build(model(name).config, tensors), metadata=model(name).metadata)


@pytest.mark.slow("converts and compiles models", quick=["qwen3-qknorm"])
@pytest.mark.parametrize("name", [*NAMES, "text-spm"])
def test_loading_and_saving_changes_nothing(name, tmp_path):
    saved = tmp_path / "saved.gguf"
    models.save_gguf(model(name), saved)
    assert contents(saved) == contents(path(name))
    assert os.listdir(tmp_path) == ["saved.gguf"]


@pytest.mark.parametrize("name", ["qwen2-fused", "gpt-oss-mxfp4"])
def test_axes_of_length_one(name, tmp_path):
    """ggml pads shapes with ones, so that files may have or lack them."""
    file = jq.gguf.read(path(name))

    def to_four(tensor):
        return jax.tree.map(lambda part: part[(None,) * (4 - tensor.ndim)], tensor)

    padded = {key: to_four(tensor) for key, tensor in file.tensors.items()}
    jq.gguf.write(tmp_path / "padded.gguf", file.metadata, padded)
    assert {t.ndim for t in jq.gguf.read(tmp_path / "padded.gguf").tensors.values()} == {4}
    got = models.named_tensors(models.from_gguf(tmp_path / "padded.gguf"))
    for key, want in models.named_tensors(model(name)).items():
        assert got[key].shape == want.shape
        jax.tree.map(np.testing.assert_array_equal, got[key], want)
    key = "blk.0.attn_norm.weight"
    two = jnp.concatenate([padded[key]] * 2)
    jq.gguf.write(tmp_path / "two.gguf", file.metadata, padded | {key: two})
    with pytest.raises(jq.GGUFError, match=rf"{key}': has shape \(2, 1, 1, \d+\), expected"):
        models.from_gguf(tmp_path / "two.gguf")


def test_value_types_of_a_file_survive(tmp_path):
    """Value types survive, even if Python's values do not distinguish them.

    Empty arrays and a custom alignment survive, too.
    """
    original, saved = tmp_path / "original.gguf", tmp_path / "saved.gguf"
    entries = {
        "general.alignment": entry("general.alignment", Value.UINT32, (64).to_bytes(4, "little"))
    }
    for kind, payload in (
        (Value.UINT8, b"\x07"),
        (Value.INT8, b"\xff"),
        (Value.UINT16, bytes(2)),
        (Value.INT16, b"\x01\x00"),
        (Value.INT32, bytes(4)),
        (Value.UINT64, u64(5)),
        (Value.INT64, u64(5)),
        (Value.FLOAT64, u64(0x3FF8 << 48)),
        (Value.BOOL, b"\x01"),
    ):
        entries[f"scalar.{kind.name}"] = entry(f"scalar.{kind.name}", kind, payload)
        entries[f"array.{kind.name}"] = array_entry(f"array.{kind.name}", kind, [payload] * 2)
    for kind in (Value.STRING, Value.FLOAT32):
        entries[f"empty.{kind.name}"] = array_entry(f"empty.{kind.name}", kind, [])
    source = tmp_path / "source.gguf"
    models.save_gguf(model("llama-gqa"), source)
    original.write_bytes(
        rewritten(source, {key: value for key, value in entries.items() if "alignment" not in key})
    )
    loaded = models.from_gguf(original)
    models.save_gguf(loaded, saved)
    got, want = jq.gguf.read_header(saved), jq.gguf.read_header(original)
    assert list(got.metadata) == list(want.metadata) and got.metadata.types == want.metadata.types
    for key, value in want.metadata.items():
        np.testing.assert_array_equal(
            got.metadata[key], value, err_msg=key, strict=isinstance(value, np.ndarray)
        )

    loaded.metadata["general.alignment"] = 64
    models.save_gguf(loaded, saved)
    assert jq.gguf.read_header(saved).alignment == 64
    assert contents(saved)[1] == contents(original)[1]


@pytest.mark.slow("converts and compiles models", quick=["float16-file_type=1"])
@pytest.mark.parametrize(
    ("dtype", "file_type"), [(jnp.float32, 0), (jnp.float16, 1), (jnp.bfloat16, 32)]
)
def test_float_models(dtype, file_type, tmp_path):
    saved = tmp_path / "saved.gguf"
    original = floats("llama3-rope", dtype)
    models.save_gguf(original, saved)
    loaded = jq.gguf.read(saved)
    assert loaded.metadata["general.file_type"] == file_type
    for name, tensor in models.named_tensors(original).items():
        got = loaded.tensors[name]
        assert got.dtype == (jnp.float32 if got.ndim == 1 else dtype), name
        np.testing.assert_array_equal(got, tensor)
    assert "rope_freqs.weight" in loaded.tensors


def test_packed_weights_under_a_float_files_metadata(tmp_path):
    """The metadata's file type is replaced if it cannot be right."""
    packed = model("llama-gqa")
    said = models.Model(packed.decoder(), metadata={**packed.metadata, "general.file_type": 1})
    models.save_gguf(said, tmp_path / "saved.gguf")
    # MOSTLY_Q4_K_M
    assert jq.gguf.read_header(tmp_path / "saved.gguf").metadata["general.file_type"] == 15


@pytest.mark.slow("converts and compiles models")
def test_a_model_without_a_file(tmp_path):
    """Metadata is derived from the config, with the value types that llama.cpp reads."""
    saved = tmp_path / "saved.gguf"
    config = dataclasses.replace(model("qwen3-qknorm").config, rope_factor=2.0)
    vectors = floats("qwen3-qknorm", jnp.float32)
    made = models.Model(
        build(
            config, jax.tree.map(lambda x: x.astype(jnp.bfloat16), models.named_tensors(vectors))
        ),
        metadata={"general.name": "made"},
    )
    models.save_gguf(made, saved)
    metadata = jq.gguf.read_header(saved).metadata
    assert metadata["general.name"] == "made" and metadata["tokenizer.ggml.model"] == "no_vocab"
    assert (metadata["general.file_type"], metadata["general.quantization_version"]) == (32, 2)
    kinds = {Value.UINT32: int, Value.FLOAT32: float, Value.STRING: str}
    assert all(type(metadata[key]) is kinds[kind] for key, kind in metadata.types.items())
    loaded = models.from_gguf(saved)
    assert loaded.config == dataclasses.replace(config, norm_eps=float(np.float32(config.norm_eps)))
    np.testing.assert_allclose(
        loaded.logits([[1, 2, 3]]), made.logits([[1, 2, 3]]), rtol=1e-5, atol=1e-5
    )


def test_metadata_of_another_decoder_is_refused(tmp_path):
    decoder = model("llama-gqa").decoder()
    wrong = {**model("llama-gqa").metadata, "llama.rope.freq_base": 5e5}
    with pytest.raises(
        ValueError, match=r"describes rope_theta=500000.0, but the decoder has 10000.0"
    ):
        models.save_gguf(models.Model(decoder, metadata=wrong), tmp_path / "saved.gguf")
    given = model("text-spm")
    with pytest.raises(ValueError, match="model.metadata holds no tokenizer.ggml"):
        models.save_gguf(models.Model(given.decoder(), given.tokenizer), tmp_path / "saved.gguf")
    tensors = models.named_tensors(model("llama-gqa"))
    tensors["blk.0.ffn_up.weight"] = tensors["blk.0.ffn_up.weight"][:-1]
    with pytest.raises(
        ValueError, match=r"'blk.0.ffn_up.weight': has shape \(767, 256\), expected \(768, 256\)"
    ):
        models.save_gguf(
            models.Model(build(model("llama-gqa").config, tensors)), tmp_path / "saved.gguf"
        )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "output_norm.weight"])
def test_weights_that_no_loader_takes_are_named(name, tmp_path):
    diverged = floats("llama-gqa", jnp.float32)
    tensors = models.named_tensors(diverged)
    tensors[name] = tensors[name].at[..., 3].set(jnp.nan)
    broken = models.Model(build(diverged.config, tensors), metadata=diverged.metadata)
    with pytest.raises(ValueError, match=f"tensor '{name}' holds NaN or infinite weights"):
        models.save_gguf(broken, tmp_path / "x.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", ["model.gguf", "decoder"])
def test_only_models_are_saved_and_quantized(given, tmp_path):
    given = model("llama-gqa").decoder() if given == "decoder" else given
    with pytest.raises(TypeError, match=f"model is a {type(given).__name__}; it must be a Model"):
        models.save_gguf(given, tmp_path / "x.gguf")
    with pytest.raises(TypeError, match=f"model is a {type(given).__name__}; it must be a Model"):
        models.quantize(given, "Q4_K_M")


def test_targets_that_cannot_be_written(tmp_path):
    with pytest.raises(FileNotFoundError, match="none/saved.gguf"):
        models.save_gguf(model("llama-gqa"), tmp_path / "none" / "saved.gguf")
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        models.save_gguf(model("llama-gqa"), tmp_path)
    assert os.listdir(tmp_path) == []


def test_progress(tmp_path):
    calls = []
    models.save_gguf(
        model("llama-gqa"), tmp_path / "t.gguf", progress=lambda *call: calls.append(call)
    )
    total = sum(info.nbytes for info in jq.gguf.read_header(path("llama-gqa")).tensors.values())
    assert calls[0] == (0, total) and calls[-1] == (total, total) and calls == sorted(calls)


def test_tensors_that_text_does_not_use_are_skipped(tmp_path, capsys):
    """Vision, audio, and multi-token-prediction layers, which block_count includes."""
    given = jq.gguf.read(path("llama-gqa"))
    unused = {
        "v.blk.0.attn_q.weight": np.zeros((4, 4), np.float32),
        "mm.0.weight": np.zeros((4, 4), np.float32),
        "a.conv1d.0.bias": np.zeros(4, np.float32),
        "blk.2.nextn.eh_proj.weight": np.zeros((4, 4), np.float32),
        "blk.2.attn_q.weight": np.zeros((4, 4), np.float32),
    }
    metadata = given.metadata | {"llama.block_count": 3, "llama.nextn_predict_layers": 1}
    file = tmp_path / "with_vision.gguf"
    tensors = given.tensors | unused
    pieces = {name: jq.gguf.TensorPieces.of(name, tensor) for name, tensor in tensors.items()}
    jq.gguf.write(file, metadata, pieces)
    with pytest.warns(
        UserWarning, match="^5 tensors are skipped, .*: a.convNd.N, blk.N.attn_q, blk.N"
    ):
        loaded = models.from_gguf(file)
    assert loaded.config == model("llama-gqa").config
    np.testing.assert_array_equal(
        loaded.logits([[1, 2, 3]]), model("llama-gqa").logits([[1, 2, 3]])
    )
    models.save_gguf(loaded, tmp_path / "saved.gguf")
    assert models.from_gguf(tmp_path / "saved.gguf").config == loaded.config
    with pytest.warns(UserWarning, match="5 tensors are skipped"):
        models.quantize_file(file, tmp_path / "quantized.gguf", "Q8_0")
    assert jq.gguf.read(tmp_path / "quantized.gguf").tensors.keys() == given.tensors.keys()

    assert cli.main(["generate", str(file), "--tokens", "1,2", "-n", "1"]) == 0
    assert "5 tensors are skipped" in capsys.readouterr().err
    assert cli.main(["quantize", str(file), str(tmp_path / "again.gguf")]) == 0
    line, _ = capsys.readouterr().err.splitlines()
    assert line.startswith("5 tensors are skipped, which")
    assert cli.main(["inspect", str(file)]) == 0
    lines = [re.sub(r"[│\s]+", " ", line).strip() for line in capsys.readouterr().out.splitlines()]
    assert {
        "v.blk.0.attn_q.weight F32 (skipped) 4 x 4 64",
        "a.conv1d.0.bias F32 (skipped) 4 16",
    } <= {*lines}
    assert "blk.2.attn_q.weight F32 (skipped) 4 x 4 64" in lines
    skipped = "5 of the tensors, 272 bytes, are skipped: text generation does not use them"
    assert lines[-1] == skipped


@pytest.mark.slow("converts and compiles models")
def test_saved_in_several_files(tmp_path):
    """Loads the parts as one model, and saves it as one file again, byte for byte."""
    given = model("text-spm")
    parts = models.save_gguf(given, tmp_path / "m.gguf", max_bytes=100_000)
    assert len(parts) > 1 and sorted(tmp_path.iterdir()) == parts
    loaded = models.load(parts[0])
    np.testing.assert_equal(dict(loaded.metadata), dict(given.metadata))
    [saved] = models.save_gguf(loaded, tmp_path / "saved.gguf")
    assert contents(saved) == contents(path("text-spm"))
    assert models.tokenizer.from_gguf(parts[0]).vocab_size == given.tokenizer.vocab_size
