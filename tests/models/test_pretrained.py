"""Hugging Face checkpoints: golden logits and tokens, transformers' own logits, malformed folders."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import nmse

from jax_q4k import models
from jax_q4k.models.pretrained import config as config_json

from . import checkpoints
from .golden import NAMES, model, reference


@pytest.mark.parametrize("name", NAMES)
def test_golden_logits_and_tokens(name, tmp_path, monkeypatch):
    tensors, config, divisors = checkpoints.weights(name)
    described = checkpoints.config_json(config) | {"tie_word_embeddings": "lm_head.weight" not in tensors}
    if divisors is not None:  # this file's divisors follow no formula
        described["rope_scaling"] = {"rope_type": "llama3"}
        monkeypatch.setattr(config_json._Rope, "divisors", lambda *_: divisors)
    folder = checkpoints.write(tmp_path / "model", described, tensors, shards=1 + len(name) % 3)
    loaded, want = models.from_pretrained(folder), reference(name)
    assert loaded.tokenizer is None and loaded.metadata["general.name"] == "model"
    got = np.asarray(loaded.logits(want.tokens[None]))[0]
    assert nmse(got, want.logits) <= 1e-8
    assert nmse(got, model(name).logits(want.tokens[None])[0]) <= 1e-10
    assert models.generate(loaded, want.prompt.tolist(), max_new_tokens=24).tokens == want.greedy.tolist()
