"""Models of one layer in block formats that are rare, and mixtures: llama.cpp's logits."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import GOLDEN, nmse

import jax_q4k as jq
from jax_q4k import models

#: Files whose seven matrices have that type; `mix`: llama-quantize's mixture, with fallbacks.
FILES = ("IQ1_M", "IQ2_XXS", "MXFP4", "NVFP4", "Q2_K", "Q3_K", "mix-IQ3_M", "mix-IQ4_XS")


@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("name", FILES)
def test_logits_are_llama_cpps(name, implementation):
    with np.load(GOLDEN / "formats" / f"{name}.npz") as data:
        tokens, want = np.append(data["prompt"], data["greedy_f32"]), data["logits_f32"]
    model = models.from_gguf(GOLDEN / "formats" / f"{name}.gguf")
    with jq.implementation(implementation, activations="f32"):
        got = model.logits(tokens[None])
    assert nmse(got[0], want) <= 1e-8
