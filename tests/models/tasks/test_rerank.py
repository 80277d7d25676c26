"""`models.rerank` and `jax-q4k rerank`: scores of documents."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import encoders
from support.helpers import nmse
from support.paths import DATA
from tokenizers import pre_tokenizers

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import cli
from jax_q4k.models.engine.reranking import pairs_of

from ..golden_files import model as decoder
from .test_encoders import RERANKERS, folder, made

__all__ = ["made"]


@pytest.mark.parametrize("name", RERANKERS)
@pytest.mark.parametrize("saved", [False, True])
def test_logits_of_transformers(name, saved, tmp_path):
    """Pairs with token types or a prompt, the classification head, and the order."""
    given, expected = folder(name)
    if saved:
        models.quantize_file(DATA / "encoders" / name, tmp_path / "a.gguf", "F32")
        given = models.load(tmp_path / "a.gguf")
    query, documents = expected["query"], expected["documents"]
    pairs = [pair.ids.tolist() for pair in pairs_of(given, query, documents, 640)]
    assert pairs == expected["pairs"]
    ranked = models.rerank(given, query, documents, normalize=False)
    assert [one.index for one in ranked] == np.argsort(expected["logits"])[::-1].tolist()
    got = [one.score for one in sorted(ranked, key=lambda one: one.index)]
    assert nmse(np.array(got), np.array(expected["logits"])) <= 1e-11
    scores = {one.index: one.score for one in models.rerank(given, query, documents)}
    want = np.array(expected.get("scores", 1 / (1 + np.exp(-np.array(expected["logits"])))))
    assert nmse(np.array([scores[i] for i in range(len(want))]), want) <= 1e-11


def test_several_labels(made):
    """The score is the probability of the first label."""
    given, held = made("bert", labels=3)
    (one,) = models.rerank(given, "the sea", ["a word"])
    ids, second = given.tokenizer.encode_pair("the sea", "a word")
    vector = encoders.reference("bert", held, ids, second)[0]
    weights = np.exp(encoders.scores(held, vector))
    assert nmse(np.array(one.score), weights[0] / weights.sum()) <= 1e-11


def test_a_decoder_with_a_template(tmp_path):
    """Scores are those of Qwen3-Reranker: rows of yes and no times the last state."""
    base = decoder("qwen3-qknorm")
    tensors = models.named_tensors(base)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2, base.config.hidden_size)).astype(np.float32)
    template = "<Query>: {query}\n<Document>: {document}\n"
    metadata = {
        **base.metadata,
        **vocabulary(base.config.vocab_size),
        "qwen3.pooling_type": np.uint32(4),
        "qwen3.classifier.output_labels": ["yes", "no"],
        "tokenizer.chat_templates": ["rerank"],
        "tokenizer.chat_template.rerank": template,
    }
    pieces = {
        name: jq.gguf.TensorPieces.of(name, tensor)
        for name, tensor in (tensors | {"cls.output.weight": rows}).items()
    }
    jq.gguf.write(tmp_path / "a.gguf", metadata, pieces)
    given = models.load(tmp_path / "a.gguf")
    with jq.implementation("native", activations="f32"):
        (one,) = models.rerank(given, "abc", ["cab"])
        ids = given.tokenizer.encode(
            template.replace("{query}", "abc").replace("{document}", "cab"), add_special=False
        )
        vector = models.embed(base, ids, pooling="last").astype(float)
    weights = np.exp(rows.astype(float) @ vector)
    assert nmse(np.array(one.score), weights[0] / weights.sum()) <= 1e-9
    with pytest.raises(ValueError, match="pooling_type is 4"):
        models.embed(given, [1])


@pytest.mark.parametrize("where", ["folder", "_name_or_path", "README.md", None])
def test_names_that_say_that_a_folder_holds_a_reranker(where, tmp_path):
    """Its head then has the rows of yes and no of the layer that the folder holds: tied or not."""
    to = tmp_path / ("My-Qwen3-Reranker" if where == "folder" else "other")
    named = {"_name_or_path": "Qwen/Qwen3-Reranker-8B"} if where == "_name_or_path" else {}
    copied("qwen3-reranker", to, **named)
    if where == "README.md":
        (to / where).write_text("---\nlicense: mit\n---\n# Qwen3-Reranker-8B\n")
    given = models.load(to)
    assert given.has_head == (where is not None)
    assert given.tokenizer.chat_templates.keys() == ({"rerank"} if where else set())
    if where is None:
        return
    assert given.metadata["qwen3.classifier.output_labels"] == ["yes", "no"]
    tensors = models.named_tensors(given)
    rows = tensors["output.weight"][np.array([257, 258])]
    np.testing.assert_array_equal(tensors["cls.output.weight"], rows)
    held = load_file(to / "model.safetensors")
    del held["lm_head.weight"]
    save_file(held, to / "model.safetensors")
    with pytest.raises(jq.CheckpointError, match="'lm_head.weight': is missing"):
        models.load(to)
    copied("qwen3-reranker", to, **named, tie_word_embeddings=True)
    save_file(held, to / "model.safetensors")
    tensors = models.named_tensors(models.load(to))
    rows = tensors["token_embd.weight"][np.array([257, 258])]
    np.testing.assert_array_equal(tensors["cls.output.weight"], rows)


def copied(name, to, **changes):
    """Copies a folder with changes of its config.json."""
    shutil.copytree(DATA / "encoders" / name, to, dirs_exist_ok=True)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))


def test_folders_of_rerankers_that_are_refused(tmp_path):
    copied("qwen3-reranker", tmp_path / "qwen3-reranker")
    file = tmp_path / "qwen3-reranker/tokenizer.json"
    described = json.loads(file.read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["yep"] = vocabulary.pop("yes")
    described["model"]["merges"][1] = ["ye", "p"]
    file.write_text(json.dumps(described))
    with pytest.raises(jq.CheckpointError, match="vocabulary: lacks 'yes', a reranker's answer"):
        models.load(file.parent)
    file.unlink()
    with pytest.raises(jq.CheckpointError, match="tokenizer.json: is missing: a reranker needs"):
        models.load(file.parent)
    copied("qwen3-labels-reranker", tmp_path / "b", id2label={str(i): str(i) for i in range(3)})
    shape = r"'score.weight': has shape \(2, 32\), expected \(3, 32\)"
    with pytest.raises(jq.CheckpointError, match=shape):
        models.load(tmp_path / "b")


def vocabulary(size):
    """Metadata of a byte-level vocabulary without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # 256 characters
    tokens = [*alphabet, *(f"<{i}>" for i in range(size - len(alphabet)))][:size]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [],
    }


def test_placeholders_in_texts_are_texts(made):
    """A query with the name of a placeholder is not a template."""
    from jax_q4k.models.engine.reranking import _names, _pair

    assert _names("a {document} b {query}{document}") == ["document", "query", "document"]
    given, _ = made("bert", labels=1)
    template = {"rerank": "{query} . {document}"}
    tokenizer = given.tokenizer.with_chat_template("")
    tokenizer.vocabulary.chat_templates.clear()
    tokenizer.vocabulary.chat_templates.update(template)
    ids = _pair(tokenizer, "a", "the {query} sea").ids.tolist()
    assert ids == tokenizer.encode("a . the {query} sea", add_special=False)


def test_wrong_arguments(made):
    given, _ = made("bert", labels=1)
    plain, _ = made("bert")
    for arguments, kind, message in (
        ((plain, "a", ["b"]), ValueError, "the model, bert, has no classification head"),
        ((given, "a", []), ValueError, "documents is empty"),
        ((given, "a", "b"), TypeError, "documents is of type str"),
        ((given, "a", [3]), TypeError, r"documents\[0\] is of type int"),
        ((given, 3, ["b"]), TypeError, "query is of type int"),
        ((given, "a", ["b", "a " * 640]), ValueError, r"documents\[1\] with the query has 64\d"),
    ):
        with pytest.raises(kind, match=message):
            models.rerank(*arguments)


def test_command(made, tmp_path, capsys):
    encoders.write(tmp_path / "a.gguf", "bert", labels=1)
    given, _ = made("bert", labels=1)
    documents = ["the sea", "a word", "calm ."]
    arguments = ["rerank", str(tmp_path / "a.gguf"), "-q", "sea", "--no-cache"]
    for document in documents:
        arguments += ["-d", document]
    assert cli.main([*arguments, "-n", "2"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    want = models.rerank(given, "sea", documents)[:2]
    assert [one["index"] for one in results] == [one.index for one in want]
    assert [one["document"] for one in results] == [documents[one.index] for one in want]
    got = np.array([one["relevance_score"] for one in results])
    assert nmse(got, np.array([one.score for one in want])) <= 1e-12
    (tmp_path / "lines.txt").write_text("the sea\na word\n")
    arguments = ["rerank", str(tmp_path / "a.gguf"), "-q", "sea", "-f", str(tmp_path / "lines.txt")]
    assert cli.main([*arguments, "--no-normalize", "--no-cache"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert sorted(one["index"] for one in results) == [0, 1]
    assert cli.main([*arguments, "-n", "0"]) == 2
    assert "--top 0 must be at least 1" in capsys.readouterr().err
