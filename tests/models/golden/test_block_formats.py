"""One-layer models in rare block formats and in mixed recipes, compared with llama.cpp's logits."""

from __future__ import annotations

import numpy as np
import pytest
from support.helpers import nmse
from support.paths import GOLDEN, TESTS

import jax_q4k as jq
from jax_q4k import models

#: Files whose seven matrices have the named type; `mix` uses llama-quantize's recipe with
#: fallbacks.
FILES = sorted(file.stem for file in (GOLDEN / "formats").glob("*.gguf"))


@pytest.mark.grid
@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("name", FILES)
def test_logits_are_llama_cpps(name, implementation):
    with np.load(GOLDEN / "formats" / f"{name}.npz") as data:
        tokens, want = np.append(data["prompt"], data["greedy_f32"]), data["logits_f32"]
    model = models.from_gguf(GOLDEN / "formats" / f"{name}.gguf")
    with jq.implementation(implementation, activations="f32"):
        got = model.logits(tokens[None])
    assert nmse(got[0], want) <= 1e-8


def test_the_page_of_models_names_every_file():
    lines = (TESTS.parent / "docs/models.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| type | products"))
    cells = [line.split("|")[4] for line in lines[start + 2 : lines.index("", start)]]
    named = {name.strip() for cell in cells for name in cell.split(",")}
    assert set(FILES) <= named
