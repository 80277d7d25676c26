"""`models.load`, which loads every kind of model."""

import numpy as np
import pytest
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models

from ..golden_files import model, path

FOLDER = GOLDEN.parent / "checkpoints" / "qwen3"


def test_a_gguf_file():
    calls = []
    loaded = models.load(path("llama-gqa"), progress=lambda *call: calls.append(call))
    assert loaded.config == model("llama-gqa").config and calls[-1][0] == calls[-1][1] > 0


@pytest.mark.parametrize("given", [FOLDER, str(FOLDER)])
def test_a_checkpoint(given):
    want = models.from_pretrained(FOLDER)
    loaded = models.load(given)
    assert loaded.config == want.config
    for got, expected in zip(loaded.weights, want.weights, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_the_demo():
    loaded = models.load("demo")
    assert loaded.metadata.keys() == jq.gguf.read_header(models.demo_path()).metadata.keys()


def test_no_model(tmp_path):
    with pytest.raises(jq.GGUFError, match="magic"):
        models.load(__file__)
    with pytest.raises(FileNotFoundError):
        models.load(tmp_path / "demo")
    with pytest.raises(FileNotFoundError, match="config.json"):
        models.load(tmp_path)
