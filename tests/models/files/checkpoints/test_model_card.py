"""Metadata that names a model, from its card, config.json and folder."""

import json
import shutil

import numpy as np
import pytest
from support.paths import DATA

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.files.checkpoints import model_card

SHAPES = {"token_embd.weight": (1000, 64), "blk.0.ffn_up_exps.weight": (8, 256, 64)}
CARD = """---
license: apache-2.0
license_name: other
base_model:
- Qwen/Qwen3-8B-Base
- https://example.org/other
language:
- en
- no
tags: [chat, math]
pipeline_tag: text-generation
datasets: HuggingFaceFW/fineweb
version: 1.5
model_name: The Name
---
# The title
"""


def metadata(folder, card=None, config=None):
    folder.mkdir(exist_ok=True)
    if card is not None:
        (folder / "README.md").write_text(card)
    return model_card.metadata(folder, config or {}, SHAPES)


def test_a_card(tmp_path):
    found = metadata(tmp_path / "Some-Model-Instruct-v1.2", CARD)
    base, data = "general.base_model.", "general.dataset."
    assert found == {
        "general.type": "model",
        "general.name": "The Name",
        "general.basename": "Some-Model",
        "general.finetune": "Instruct",
        "general.size_label": "8x80K",
        "general.version": "1.5",
        "general.license": "apache-2.0",
        "general.license.name": "other",
        base + "count": 2,
        base + "0.name": "Qwen3 8B Base",
        base + "0.organization": "Qwen",
        base + "0.repo_url": "https://huggingface.co/Qwen/Qwen3-8B-Base",
        base + "1.repo_url": "https://example.org/other",
        data + "count": 1,
        data + "0.name": "Fineweb",
        data + "0.organization": "HuggingFaceFW",
        data + "0.repo_url": "https://huggingface.co/HuggingFaceFW/fineweb",
        "general.tags": ["chat", "math", "text-generation"],
        "general.languages": ["en", "no"],
    }


def test_without_a_card(tmp_path):
    """The size is counted: all weights besides experts, and those of one expert."""
    found = metadata(tmp_path / "folder", config={"_name_or_path": "org/Little-llama"})
    assert found == {
        "general.type": "model",
        "general.name": "Little Llama",
        "general.organization": "Org",
        "general.size_label": "8x80K",
    }
    assert metadata(tmp_path / "folder", config={"_name_or_path": "/home/me/a/b"}) == {
        "general.type": "model",
        "general.name": "Folder",
        "general.size_label": "8x80K",
    }


@pytest.mark.parametrize(
    "card",
    [
        "---\na: [\n---\n",
        "---\ndescription: {a: b}\n---\n",
        "---\ntags: [[1, [2, {}]]]\n---\n",
        "---\nbase_model: 3\nlicense: {a: b}\n---\n",
        '---\ndescription: "\\ud800"\nname: [1]\nauthor: true\n---\n',
        "---\n" + "[" * 100_000 + "\n---\n",
        "---\n" + "a" * (5 << 20),
    ],
)
def test_damaged_cards_are_ignored(tmp_path, card):
    with pytest.warns(UserWarning, match=r"README\.md: its front matter is ignored"):
        found = metadata(tmp_path / "folder", card)
    assert found["general.name"] == "Folder"


@pytest.mark.parametrize("card", ["", "# Title", "---\n---\n", "---\n- a\n---\n", "\x00"])
def test_cards_without_front_matter(tmp_path, card):
    assert metadata(tmp_path / "folder", card)["general.name"] == "Folder"


def test_a_converted_folder_has_it(tmp_path):
    source = next(file.parent for file in sorted((DATA / "checkpoints").glob("*/config.json")))
    folder, target = tmp_path / "My-Model", tmp_path / "out.gguf"
    shutil.copytree(source, folder)
    (folder / "README.md").write_text(CARD)
    models.quantize_file(folder, target, "F16")
    found = jq.gguf.read_header(target).metadata
    assert found["general.license"] == "apache-2.0"
    assert found["general.tags"] == ["chat", "math", "text-generation"]
    assert isinstance(found["general.base_model.count"], int | np.integer)
    assert models.load(target).metadata["general.name"] == "The Name"
    assert json.loads((folder / "config.json").read_text())
