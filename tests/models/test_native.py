"""The golden models by the CPU's kernels."""

import json

import pytest
from helpers import GOLDEN, nmse
from implementations import needs_native

import jax_q4k as jq
from jax_q4k import models

from . import golden

pytestmark = needs_native


@pytest.mark.parametrize("name", golden.NAMES)
def test_logits_and_greedy_tokens(name):
    model, reference = golden.model(name), golden.reference(name)
    tokens = reference.tokens[None]
    with jq.implementation("native", activations="f32"):
        assert nmse(model.logits(tokens)[0], reference.logits) <= 1e-8
        out = models.generate(model, reference.prompt.tolist(), max_new_tokens=len(reference.greedy))
        assert out.tokens == reference.greedy.tolist()
    theirs = json.loads((GOLDEN / f"{name}.json").read_text())["nmse_q8act"]
    with jq.implementation("native"):
        assert nmse(model.logits(tokens)[0], reference.logits) <= 1.2 * theirs  # llama.cpp's own int8 activations
