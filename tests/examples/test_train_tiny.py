"""The training example on a short text: it learns, resumes, and saves a model that runs."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest
from support.paths import EXAMPLES

from jax_q4k import models

pytestmark = pytest.mark.cpu_kernels

SETTINGS = [
    "--batch",
    "2",
    "--context",
    "32",
    "--vocab-size",
    "280",
    "--layers",
    "1",
    "--warmup",
    "1",
]


@pytest.fixture(scope="module")
def train_tiny():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import train_tiny

        yield train_tiny
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture
def text(tmp_path):
    sentences = (
        "The ship left the harbour at noon.\n\n",
        "Anne had not expected\nto see him again.\n\n",
    )
    path = tmp_path / "text.txt"
    path.write_text("".join(sentences[i % 2] for i in range(300)))
    return path


def losses(work):
    """Maps steps to log entries; a step that was run twice must have the same losses twice."""
    entries = [json.loads(line) for line in (work / "loss.jsonl").read_text().splitlines()]
    by_step = {entry["step"]: entry for entry in entries}
    assert all(entry == by_step[entry["step"]] for entry in entries)
    return by_step


@pytest.mark.slow("trains three times")
def test_an_interrupted_run_ends_as_one_that_was_not(train_tiny, text, tmp_path, monkeypatch):
    def run(work):
        train_tiny.main([str(tmp_path / work), "--text", str(text), "--steps", "9", *SETTINGS])

    def interrupted(self, step, *arguments):
        if step == 7:
            raise KeyboardInterrupt
        return batch(self, step, *arguments)

    batch = train_tiny.Text.batch
    monkeypatch.setattr(train_tiny, "EVALUATE_EVERY", 3)
    run("one")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train_tiny.Text, "batch", interrupted)
        run("two")
    assert list(losses(tmp_path / "two")) == [3, 6]
    run("two")

    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    assert losses(tmp_path / "one")[9]["held_out"] < 0.8 * losses(tmp_path / "one")[3]["held_out"]
    assert (tmp_path / "one" / "loss.png").read_bytes().startswith(b"\x89PNG")
    one, two = (models.from_gguf(tmp_path / work / "float.gguf") for work in ("one", "two"))
    for a, b in zip(one.weights, two.weights, strict=True):
        np.testing.assert_array_equal(a, b)
    assert one.tokenizer.decode(one.tokenizer.encode("Anne left at noon.")) == "Anne left at noon."
    assert one.tokenizer.encode("Anne")[0] == one.tokenizer.bos_token_id == 0


def test_batches_begin_at_paragraphs_and_leave_the_held_out_text_alone(train_tiny, text):
    book = train_tiny.tiny_corpus.from_files([text])[0]
    assert book.splitlines()[:2] == [
        "The ship left the harbour at noon.",
        "Anne had not expected to see him again.",
    ]
    training, held_out = train_tiny._split(book)
    assert training + held_out == book and training.endswith("\n")
    assert 0.04 < len(held_out) / len(book) < 0.07


def test_a_held_out_text_shorter_than_a_window_is_refused(train_tiny, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("A line.\n\n" * 40)
    with pytest.raises(SystemExit, match="less than a window of 32"):
        train_tiny.main([str(tmp_path / "work"), "--text", str(short), "--steps", "1", *SETTINGS])


def test_a_text_of_one_paragraph_is_refused(train_tiny, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The ship left the harbour at noon. " * 300)
    with pytest.raises(SystemExit, match="no window of 32 tokens; it must be several paragraphs"):
        train_tiny.main([str(tmp_path / "work"), "--text", str(path), "--steps", "1", *SETTINGS])


@pytest.mark.slow("trains")
def test_other_settings_in_the_same_folder_are_refused(train_tiny, text, tmp_path):
    arguments = [str(tmp_path / "work"), "--text", str(text), "--steps", "1", *SETTINGS]
    train_tiny.main(arguments)
    for option, before in (("--vocab-size", 280), ("--layers", 1)):
        with pytest.raises(SystemExit, match=f"work is of a run with {option} {before}: give that"):
            train_tiny.main([*arguments, option, "300"])


@pytest.mark.parametrize("option", ["--steps", "--batch", "--context", "--vocab-size", "--layers"])
def test_sizes_out_of_range(train_tiny, tmp_path, capsys, option):
    with pytest.raises(SystemExit):
        train_tiny.main([str(tmp_path / "work"), option, "-1"])
    assert re.search(rf"argument {option}: -1 must be at least \d", capsys.readouterr().err)
    assert not (tmp_path / "work").exists()
