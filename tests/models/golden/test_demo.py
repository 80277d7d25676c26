"""The demo model of the package: an ordinary Q4_K_M file that has learned English."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support.paths import DATA

import jax_q4k as jq
from jax_q4k import models

pytestmark = pytest.mark.cpu_kernels

CARD = models.demo_path().with_suffix(".md")
EXCERPT = (DATA / "persuasion.txt").read_text()  # from the novel's last pages, which were held out


@pytest.fixture(scope="module")
def model():
    return models.from_gguf(models.demo_path())


def test_the_file(model):
    header = jq.gguf.read_header(models.demo_path())
    assert header.file_size <= 5_000_000
    assert header.metadata["general.file_type"] == 15  # mostly Q4_K, medium
    types = {tensor.type.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    assert types == {"Q4_K", "Q6_K"}
    assert 3e6 <= sum(np.prod(tensor.shape) for tensor in header.tensors.values()) <= 8e6
    assert model.config.architecture == "llama" and model.config.hidden_size % 256 == 0


def test_it_predicts_a_text_it_never_saw(model):
    """Uniform tokens would cost 3.1 bits per byte, random bytes 8."""
    assert models.score(model, EXCERPT).bits_per_byte < 1.6


def test_its_text_is_words(model):
    """Most words that it writes are among the 3,000 most common of its training text.

    Of that text's own words, 93 in 100 are.
    """
    words = set((DATA / "common_words.txt").read_text().split())
    out = models.generate(
        model, ["She was", "My dear", "The king"], max_new_tokens=60, temperature=0.7, seed=3
    )
    written = [word for one in out for word in re.findall(r"[a-z]+", one.text.lower())]
    assert len(written) >= 60
    assert sum(word in words for word in written) >= 0.85 * len(written)


def test_the_card_says_what_the_files_score():
    """Compares bits per byte in the model card: Q4_K_M is within 3% of the float weights."""
    rows = dict(re.findall(r"^\| (F32|Q\w+)\b.*\| ([\d.]+) \|$", CARD.read_text(), re.MULTILINE))
    assert {"F32", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M"} <= rows.keys()
    assert float(rows["Q4_K_M"]) <= 1.03 * float(rows["F32"])
