"""Rope frequency divisors in gpt-oss files, for which llama.cpp reads no such tensor."""

from __future__ import annotations

import numpy as np
import pytest

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.files import rope_divisors
from jax_q4k.models.network import build

from .. import golden_files

TOKENS = np.arange(5, 29)[None]
NAME, KEY = "rope_freqs.weight", rope_divisors.KEY


@pytest.fixture(scope="module")
def divided() -> models.Model:
    """The golden model with other frequencies."""
    original = golden_files.model("gpt-oss")
    divisors = np.linspace(1, 9, original.config.rope_dim // 2, dtype=np.float32)
    tensors = dict(models.named_tensors(original)) | {NAME: divisors}
    return models.Model(build.build(original.config, tensors), None, original.metadata)


def test_a_saved_file_has_them_in_its_metadata(divided, tmp_path):
    models.save_gguf(divided, tmp_path / "model.gguf")
    header = jq.gguf.read_header(tmp_path / "model.gguf")
    assert NAME not in header.tensors and len(header.metadata[KEY]) == divided.config.rope_dim // 2
    again = models.from_gguf(tmp_path / "model.gguf")
    logits = divided.logits(TOKENS)
    np.testing.assert_array_equal(again.logits(TOKENS), logits)
    assert np.abs(golden_files.model("gpt-oss").logits(TOKENS) - logits).max() > 0.1
    models.save_gguf(again, tmp_path / "twice.gguf")
    assert (tmp_path / "twice.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


def test_quantizing_keeps_them(divided, tmp_path):
    models.save_gguf(divided, tmp_path / "model.gguf")
    models.quantize_file(tmp_path / "model.gguf", tmp_path / "q8.gguf", "Q8_0")
    first, second = (models.from_gguf(tmp_path / f"{name}.gguf") for name in ("model", "q8"))
    given, kept = (dict(models.named_tensors(model))[NAME] for model in (first, second))
    np.testing.assert_array_equal(given, kept)


def test_llamas_files_have_the_tensor(tmp_path):
    llama = golden_files.model("llama3-rope")
    assert NAME in models.named_tensors(llama)
    models.save_gguf(llama, tmp_path / "model.gguf")
    header = jq.gguf.read_header(tmp_path / "model.gguf")
    assert NAME in header.tensors and KEY not in header.metadata


@pytest.mark.parametrize(
    "value", [[1.0], [0.0] * 16, [float("nan")] * 16, "1", 3, ["a"] * 16], ids=str
)
def test_bad_divisors_are_refused(value, divided, tmp_path):
    models.save_gguf(divided, tmp_path / "model.gguf")
    pairs = divided.config.rope_dim // 2
    value = value * (pairs // 16) if isinstance(value, list) and len(value) == 16 else value
    file = jq.gguf.read(tmp_path / "model.gguf")
    metadata = jq.gguf.Metadata(file.metadata)
    metadata[KEY] = value
    jq.gguf.write(tmp_path / "bad.gguf", metadata, file.tensors)
    with pytest.raises(jq.GGUFError, match=f"{KEY}: must be {pairs} finite numbers above"):
        models.from_gguf(tmp_path / "bad.gguf")
