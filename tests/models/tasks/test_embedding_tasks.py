"""Adapters of tasks in folders of jina-embeddings-v3, against weights merged in NumPy."""

import json
import pickle

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import encoder_folders, encoders
from support.helpers import nmse

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import cli
from jax_q4k.models.engine.encoding import Text, Vectors, encoded

PROMPTS = {"retrieval.query": "query : ", "separation": "", "text-matching": ""}
BAR = 1e-11


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder, model, weights, and weights of each task."""
    folder = tmp_path_factory.mktemp("tasks")
    held, merged = encoder_folders.write_with_tasks(folder, PROMPTS)
    return folder, models.load(folder), held, merged


def ids_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 40, count).tolist()


def reference(weights, ids):
    return encoders.reference("jina-bert-v3", weights, ids)


def test_vectors_of_each_task(made):
    """Ids get no prompt. Every task differs from the base weights, which no task uses."""
    _, given, held, merged = made
    assert dict(given.tasks) == PROMPTS
    rows = [ids_of(29), ids_of(3, 1)]
    for task in (None, *PROMPTS):
        weights = held if task is None else merged[task]
        found = models.embed(given, rows, pooling="none", task=task)
        for ids, got in zip(rows, found, strict=True):
            assert nmse(got, reference(weights, ids)) <= BAR, task
            if task is not None:
                assert nmse(got, reference(held, ids)) > 0.01, task


def test_prompts_precede_texts(made):
    _, given, _, merged = made
    text = "the sea was calm"
    got = models.embed(given, [text], task="retrieval.query")[0]
    ids = given.tokenizer.encode(PROMPTS["retrieval.query"] + text)
    assert ids != given.tokenizer.encode(text)
    want = reference(merged["retrieval.query"], ids).mean(0)
    assert nmse(got, want) <= BAR
    single = models.embed(given, text, task="retrieval.query")
    assert nmse(single, want) <= BAR


def test_a_batch_mixes_tasks(made):
    _, given, held, merged = made
    texts = [Text(np.array(ids_of(9), np.int32), task=i) for i in range(1 + len(PROMPTS))]
    found = encoded(given, texts, Vectors("mean"))
    for weights, got in zip([held, *merged.values()], found, strict=True):
        assert nmse(got, reference(weights, ids_of(9)).mean(0)) <= BAR
    with models.EncoderEngine(given) as engine:
        got = engine.embed(ids_of(9), task="separation")
    np.testing.assert_array_equal(got, models.embed(given, ids_of(9), task="separation"))


def test_an_unknown_task(made, tmp_path):
    _, given, *_ = made
    known = "retrieval.query, separation, text-matching"
    with pytest.raises(ValueError, match=f"task='retrieval' must be one of {known}"):
        models.embed(given, "a", task="retrieval")
    encoders.write(tmp_path / "a.gguf", "bert")
    without = models.load(tmp_path / "a.gguf")
    with pytest.raises(ValueError, match="task='separation' must be None, as the model has no"):
        models.embed(without, "a", task="separation")


def test_copies_keep_tasks(made):
    """A pickled and a quantized model, whose weights are packed while the adapters are not."""
    _, given, _, merged = made
    for copy, bar in (
        (pickle.loads(pickle.dumps(given)), BAR),
        (models.quantize(given, "Q8_0"), 1e-3),
    ):
        got = models.embed(copy, ids_of(29), pooling="none", task="separation")
        assert nmse(got, reference(merged["separation"], ids_of(29))) <= bar


def test_gguf_files_hold_no_adapters(made, tmp_path):
    folder, given, *_ = made
    warning = "a GGUF file holds no adapters of tasks; only the folder has retrieval.query, sep"
    with pytest.warns(UserWarning, match=warning):
        models.save_gguf(given, tmp_path / "a.gguf")
    with pytest.warns(UserWarning, match=warning):
        models.quantize_file(folder, tmp_path / "b.gguf", "F32")
    again = models.load(tmp_path / "a.gguf")
    assert not again.tasks
    np.testing.assert_array_equal(models.embed(again, ids_of(9)), models.embed(given, ids_of(9)))


def test_prompts_of_sentence_transformers(made, tmp_path):
    """config.json of early folders has no task_instructions."""
    encoder_folders.write_with_tasks(tmp_path, PROMPTS)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["task_instructions"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = {"prompts": {"separation": "split : ", "other": "x"}, "default_prompt_name": None}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    assert dict(models.load(tmp_path).tasks) == dict.fromkeys(PROMPTS, "") | {
        "separation": "split : "
    }


def test_the_command(made, capsys):
    folder, given, *_ = made
    text = "the sea was calm"
    assert cli.main(["embed", str(folder), "-p", text, "--task", "retrieval.query"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["data"]
    want = models.embed(given, text, normalize=True, task="retrieval.query")
    assert nmse(np.array(found["embedding"]), want) <= BAR
    assert cli.main(["embed", str(folder), "-p", text, "--task", "query"]) == 2
    assert "task='query' must be one of retrieval.query" in capsys.readouterr().err


_MODULE = "roberta.encoder.layers.1.mlp.fc1.parametrizations.weight.0.lora_"


@pytest.mark.parametrize(
    "change, message",
    [
        ({f"{_MODULE}B": None}, "has only one of lora_A and lora_B: .*1.mlp.fc1.*lora_B' is miss"),
        ({f"{_MODULE}A": np.ones((2, 4, 64), "f4")}, r"lora_A'.*\(2, 4, 64\), expected \(3, 4, 64"),
        ({f"{_MODULE}A": np.ones((3, 0, 64), "f4")}, r"lora_A'.*expected \(3, rank, 64\)"),
        ({f"{_MODULE}A": np.ones(4, "f4")}, r"lora_A'.*\(4,\), expected \(3, rank, 64\)"),
        ({f"{_MODULE}B": np.ones((3, 96, 5), "f4")}, r"lora_B'.*expected \(3, 96, 4\)"),
        ({f"{_MODULE}B": np.full((3, 96, 4), 1e20, "f4")}, "lora_B'.*so large that embeddings"),
        ({f"{_MODULE}B": np.full((3, 96, 4), np.nan, "f4")}, "lora_B'.*NaN"),
        ({f"{_MODULE}A": np.ones((3, 4, 64), "i4")}, "lora_A'.*dtype I32"),
        ("all", "config.json names tasks: retrieval.query, separation, text-matching"),
        ({"lora_adaptations": ["a", "a", "b"]}, "lora_adaptations: holds 'a', expected different"),
        ({"lora_adaptations": [1]}, "lora_adaptations: holds 1, expected different names"),
        ({"lora_alpha": 1e9}, "lora_alpha"),
        ({"task_instructions": {"separation": 3}}, "task_instructions.separation"),
    ],
)
def test_damaged_folders(change, message, tmp_path):
    encoder_folders.write_with_tasks(tmp_path, PROMPTS)
    held = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    if change == "all":
        held = {name: value for name, value in held.items() if "lora_" not in name}
    elif _MODULE in next(iter(change)):
        held = {name: value for name, value in (held | change).items() if value is not None}
    else:
        config |= change
    save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(jq.CheckpointError, match=message):
        models.load(tmp_path)
