"""`models.embed` and `jax-q4k embed`: embeddings of texts."""

import json
import shutil

import numpy as np
import pytest
from support.helpers import nmse
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import cli
from jax_q4k.models.config.pooling import POOLINGS
from jax_q4k.models.engine import encoding
from jax_q4k.models.network.layers import LayerNorm

from ..golden_files import model, path

TEXTS = ["The sea", "a", "was calm, and nobody said a word about what had been there before"]


@pytest.fixture
def exact():
    """Float32 activations, so that batches round like single texts."""
    with jq.implementation("native", activations="f32"):
        yield


def of_decoder(given, ids):
    """The final norm's output for each token, in NumPy from the decoder's hidden states."""
    decoder = given.decoder()
    tokens = np.array([ids], np.int32)
    cache = models.PagedCache.create(given.config, 1, 64)
    x, _ = decoder.prefill_vectors(tokens, np.array([len(ids)], np.int32), cache)
    x = np.asarray(x[0], np.float64)
    norm = decoder.norm
    if isinstance(norm, LayerNorm):
        x = x - x.mean(-1, keepdims=True)
    weight = np.asarray(norm.weight.get_value(), np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps) * weight


def pooled(vectors, pooling):
    return {"mean": vectors.mean(0), "last": vectors[-1], "cls": vectors[0], "none": vectors}[
        pooling
    ]


@pytest.mark.slow(
    "compiles a program a model and pooling",
    quick=["cls-llama-gqa"],
)
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "cohere2", "lfm2"])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.usefixtures("exact")
def test_pooled_vectors_of_the_final_norm(name, pooling):
    """Rows of different lengths, compared with each row alone in NumPy."""
    given, rng = model(name), np.random.default_rng(3)
    rows = [rng.integers(0, given.config.vocab_size, n).tolist() for n in (9, 1, 17, 8)]
    found = models.embed(given, rows, pooling=pooling)
    assert len(found) == 4
    for ids, vector in zip(rows, found, strict=True):
        want = pooled(of_decoder(given, ids), pooling)
        assert vector.shape == want.shape and vector.dtype == np.float32
        assert nmse(vector, want) <= 1e-10


@pytest.mark.usefixtures("exact")
def test_a_batch_is_its_texts_alone(monkeypatch):
    """Also holds if texts are split into batches of few tokens."""
    given = model("text-spm")
    alone = [models.embed(given, text, normalize=True) for text in TEXTS]
    assert alone[0].shape == (given.config.hidden_size,)
    together = models.embed(given, TEXTS, normalize=True)
    assert together.shape == (3, given.config.hidden_size) and together.dtype == np.float32
    monkeypatch.setattr(encoding, "TOKENS", 16)
    steps = []
    cut = models.embed(given, TEXTS, normalize=True, progress=lambda *step: steps.append(step))
    assert steps == [(1, 3), (3, 3)]
    for found in (together, cut):
        for a, b in zip(found, alone, strict=True):
            assert nmse(a, b) <= 1e-12
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-6)


def test_texts_are_encoded_as_prompts_are():
    given = model("text-spm")
    ids = given.tokenizer.encode(TEXTS[0])
    np.testing.assert_array_equal(models.embed(given, TEXTS[0]), models.embed(given, ids))
    np.testing.assert_array_equal(
        models.embed(given, TEXTS[0]), models.embed(given, np.array(ids, np.int64))
    )


def saying(given, **metadata):
    """The model with these metadata entries."""
    found = {key.replace("__", "."): value for key, value in metadata.items()}
    return models.Model(given.parts(), given.tokenizer, given.metadata | found)


@pytest.mark.parametrize(
    ("number", "pooling"),
    [(0, "none"), (1, "mean"), (2, "cls"), (3, "last"), (np.uint32(3), "last")],
)
def test_the_file_says_how_to_pool(number, pooling):
    """GGUF's pooling_type; an argument overrides it."""
    given = model("llama-gqa")
    ids, file = [5, 6, 7, 99], saying(given, llama__pooling_type=number)
    want = models.embed(given, ids, pooling=pooling)
    np.testing.assert_array_equal(models.embed(file, ids), want)
    others = {"mean", "cls", "last"} - {pooling}
    for other in others:
        found = models.embed(file, ids, pooling=other)
        np.testing.assert_array_equal(found, models.embed(given, ids, pooling=other))
        assert not np.array_equal(found, want)
    mean = models.embed(given, ids, pooling="mean")
    np.testing.assert_array_equal(models.embed(given, ids), mean)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (4, r"llama.pooling_type is 4 \(rank\); supported: 0 \(none\), 1 \(mean\)"),
        (7, "llama.pooling_type is 7; supported:"),
        (-1, "llama.pooling_type is -1; supported:"),
        (True, "llama.pooling_type is True"),
        ([1], r"llama.pooling_type is \[1\]; supported:"),
        (1.0, "llama.pooling_type is 1.0"),
        ("mean", "llama.pooling_type is 'mean'"),
    ],
)
def test_poolings_that_are_not_supported(value, message):
    file = saying(model("llama-gqa"), llama__pooling_type=value)
    with pytest.raises(ValueError, match=message):
        models.embed(file, [1, 2])
    assert models.embed(file, [1, 2], pooling="mean").ndim == 1


def module(kind, path=""):
    return {"type": f"sentence_transformers.models.{kind}", "path": path}


TRANSFORMER, POOLING, NORMALIZE = (
    module("Transformer"),
    module("Pooling", "1_Pooling"),
    module("Normalize", "2_Normalize"),
)
LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}


@pytest.fixture
def folder(tmp_path):
    """Returns a function that adds files (path, content) to a checkpoint's folder."""

    def made(**files):
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        at = shutil.copytree(GOLDEN.parent / "checkpoints" / "llama", tmp_path / "model")
        (at / "1_Pooling").mkdir()
        names = {"pooling": "1_Pooling/config.json", "bert": "sentence_bert_config.json"}
        names["settings"] = "config_sentence_transformers.json"
        for name, content in files.items():
            (at / names.get(name, f"{name}.json")).write_text(json.dumps(content))
        return at

    return made


@pytest.mark.parametrize(
    ("files", "pooling", "normalize"),
    [
        ({}, "mean", False),
        ({"modules": [TRANSFORMER, POOLING, NORMALIZE], "pooling": LAST}, "last", True),
        (
            {"modules": [TRANSFORMER, POOLING], "pooling": {"pooling_mode_cls_token": True}},
            "cls",
            False,
        ),
        ({"modules": [TRANSFORMER, NORMALIZE]}, "mean", True),
        ({"pooling": LAST}, "last", False),
        ({"pooling": {"pooling_mode": "lasttoken"}, "bert": {"max_seq_length": 8}}, "last", False),
        ({"pooling": LAST, "settings": {"prompts": {"query": "Q: "}, "default_prompt_name": None}},)
        + ("last", False),
    ],
)
def test_a_folder_says_how_to_pool(folder, tmp_path, files, pooling, normalize):
    """A GGUF file saved from the folder gives the same."""
    given = models.load(folder(**files))
    ids = [5, 6, 7]
    want = models.embed(given, ids, pooling=pooling, normalize=normalize)
    assert np.isclose(np.linalg.norm(want), 1, atol=1e-6) == normalize
    np.testing.assert_array_equal(models.embed(given, ids), want)
    models.save_gguf(given, tmp_path / "saved.gguf")
    again = models.load(tmp_path / "saved.gguf")
    np.testing.assert_array_equal(models.embed(again, ids), want)
    assert not np.isclose(np.linalg.norm(models.embed(given, ids, normalize=False)), 1, atol=1e-3)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules": [TRANSFORMER, POOLING, module("Dense", "2_Dense")], "pooling": LAST},)
        + ("modules.json: module 'Dense' here is not supported: expected one of Transformer",),
        ({"modules": [TRANSFORMER, NORMALIZE, POOLING], "pooling": LAST}, "module 'Pooling' here"),
        ({"pooling": {"pooling_mode_max_tokens": True}},)
        + ("1_Pooling/config.json: pooling of max is not supported: expected one of mean",),
        ({"pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}},)
        + ("pooling of mean and cls is not supported",),
        ({"pooling": {}}, "pooling of nothing is not supported"),
        ({"pooling": LAST | {"include_prompt": False}}, "include_prompt=false is not supported"),
        ({"settings": {"default_prompt_name": "query"}}, "default_prompt_name='query' is not"),
        ({"bert": {"do_lower_case": True}}, "sentence_bert_config.json: do_lower_case=true is not"),
    ],
)
def test_folders_with_unsupported_pooling(folder, files, message):
    """The folder still generates text, and embeds with an explicit `pooling`."""
    given = models.load(folder(**files))
    with pytest.raises(ValueError, match=f"{message}.*; pass pooling="):
        models.embed(given, [1, 2])
    assert models.embed(given, [1, 2], pooling="mean").ndim == 1
    assert len(models.generate(given, [1, 2], max_new_tokens=2, ignore_end=True).tokens) == 2


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules": {}}, "modules.json: modules: must be an array, not an object"),
        ({"modules": [{"path": ""}]}, r"modules.json: modules\[0\].type: is missing"),
        (
            {"modules": [module("Pooling", "../x")]},
            r"modules\[0\].path: is '../x', expected a folder",
        ),
        ({"pooling": {"pooling_mode_cls_token": 1}}, "pooling_mode_cls_token: must be a boolean"),
    ],
)
def test_malformed_settings_of_a_folder(folder, files, message):
    with pytest.raises(jq.CheckpointError, match=message):
        models.load(folder(**files))


@pytest.mark.parametrize(
    ("texts", "options", "error", "message"),
    [
        ([], {}, ValueError, "texts is empty; at least one text of at least one token is needed"),
        (5, {}, TypeError, "texts is of type int; it must be a text, ids, or a list of either"),
        (b"ab", {}, TypeError, "texts is bytes; decode them to text, or pass a list of token ids"),
        (["a"], {}, ValueError, r"texts\[0\] is a text, but the model has no tokenizer"),
        ([[1], []], {}, ValueError, r"texts\[1\] has shape \(0,\); .* at least one token"),
        ([[[1]]], {}, ValueError, r"texts\[0\] has shape \(1, 1\)"),
        ([[1], [9999]], {}, ValueError, r"texts\[1\] holds token id 9999; ids must be 0 to"),
        ([1.5], {}, TypeError, "text has dtype float64; it must hold integers"),
        ([[1] * 100_000], {}, ValueError, r"texts\[0\] has 100000 tokens; the context length is"),
        ([[1]], {"pooling": "max"}, ValueError, "pooling='max' must be one of mean, last, cls"),
    ],
)
def test_refused(texts, options, error, message):
    with pytest.raises(error, match=message):
        models.embed(model("llama-gqa"), texts, **options)


@pytest.fixture
def run(capsys):
    """Returns a function that runs a command line: (exit code, standard output, standard error)."""

    def run(*arguments):
        capsys.readouterr()
        code = cli.main(("embed", *map(str, arguments)))
        return code, *capsys.readouterr()

    return run


@pytest.mark.slow("compiles several programs", quick=["pooling1"])
@pytest.mark.parametrize("pooling", [[], ["--pooling", "last", "--no-normalize"]])
def test_json(run, pooling, tmp_path):
    """Prompts from the command line or a file give equal bits."""
    code, out, err = run(path("text-spm"), "-p", TEXTS[0], "-p", TEXTS[1], *pooling)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [(row["object"], row["index"]) for row in found["data"]] == [
        ("embedding", 0),
        ("embedding", 1),
    ]
    options = {"pooling": "last"} if pooling else {"normalize": True}
    want = models.embed(model("text-spm"), TEXTS[:2], **options)
    got = np.array([row["embedding"] for row in found["data"]], np.float32)
    np.testing.assert_array_equal(got, want)
    file = tmp_path / "texts.txt"
    file.write_bytes(f"{TEXTS[0]}\r\n{TEXTS[1]}".encode())
    assert run(path("text-spm"), "-f", file, *pooling) == (0, out, "")
    file.write_bytes(f"{TEXTS[0]}\n{TEXTS[1]}\n".encode())
    assert run(path("text-spm"), "-f", file, *pooling) == (0, out, "")


def test_json_of_every_token(run):
    none = ("--pooling", "none", "--no-normalize")
    code, out, _ = run(path("text-spm"), "-p", TEXTS[0], *none)
    [row] = json.loads(out)["data"]
    want = models.embed(model("text-spm"), TEXTS[0], pooling="none")
    assert code == 0 and want.ndim == 2
    np.testing.assert_array_equal(np.array(row["embedding"], np.float32), want)


def test_errors_of_the_command(run, tmp_path, monkeypatch):
    code, _, err = run(path("llama-gqa"), "-p", "a")
    assert code == 2 and "the model has no tokenizer" in err
    (tmp_path / "empty.txt").touch()
    code, _, err = run(path("text-spm"), "-f", tmp_path / "empty.txt")
    assert code == 2 and "texts is empty" in err
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    code, _, err = run(path("text-spm"), "-f", tmp_path / "latin.txt")
    assert code == 2 and "is not UTF-8: byte 3" in err
    code, _, err = run(path("text-spm"), "-f", tmp_path / "none.txt")
    assert code == 2 and "No such file" in err
    monkeypatch.setattr(cli.commands.embed, "MAX_TEXT", 5)
    (tmp_path / "long.txt").write_text("waves\n")
    code, _, err = run(path("text-spm"), "-f", tmp_path / "long.txt")
    assert code == 2 and "long.txt holds more than 5 bytes" in err
