"""Scores of texts, compared with float64 log-softmax of the full pass's logits."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import weakref

import numpy as np
import pytest
import tokenizers
from support.paths import GOLDEN, TESTS
from tokenizers import Tokenizer, pre_tokenizers, trainers

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.tasks.perplexity import Score, TooShortError, score

pytestmark = pytest.mark.cpu_kernels

EXAMPLES = TESTS.parent / "examples"

TEXT = "The sea was calm, and the two sisters walked along the shore until the evening came. " * 3


@pytest.fixture(scope="module")
def model():
    return models.from_gguf(GOLDEN / "text-spm.Q4_K_M.gguf")


def nats(model, window):
    logits = np.asarray(model.logits([window]), np.float64)[0, :-1]
    log_p = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    log_p -= logits.max(-1, keepdims=True)
    return -log_p[np.arange(len(window) - 1), window[1:]].sum()


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("context", [7, 16, 32])
def test_windows_begin_with_bos_and_cover_the_text(model, context):
    ids = model.tokenizer.encode(TEXT, add_special=False)
    windows = [[1, *ids[i : i + context - 1]] for i in range(0, len(ids), context - 1)]
    found = score(model, TEXT, context=context)
    assert found.tokens == len(ids)
    assert found.bytes == len((" " + TEXT).encode())  # SentencePiece adds a leading space
    assert found.nats == pytest.approx(sum(nats(model, window) for window in windows), rel=1e-5)


@pytest.mark.usefixtures("exact")
def test_without_bos_a_windows_first_token_is_context_only(model, monkeypatch):
    monkeypatch.setattr(
        model.tokenizer,
        "vocabulary",
        dataclasses.replace(model.tokenizer.vocabulary, before=()),
    )
    ids = model.tokenizer.encode(TEXT, add_special=False)
    windows = [ids[i : i + 16] for i in range(0, len(ids), 16)]
    found = score(model, TEXT, context=16)
    assert found.tokens == len(ids) - len(windows)
    assert found.nats == pytest.approx(
        sum(nats(model, window) for window in windows if len(window) > 1), rel=1e-5
    )
    for text in ("", "the"):
        with pytest.raises(ValueError, match="too few tokens"):
            score(model, text, context=16)


def test_texts_of_special_tokens_are_texts(model):
    assert (
        score(model, "a</s>b", context=16).tokens
        == len(model.tokenizer.encode("a</s>b", add_special=False))
        > 3
    )


@pytest.mark.parametrize(("longest", "windows"), [(1024, 2), (511, 3)])
def test_the_models_context_is_taken_up_to_512(longest, windows, monkeypatch):
    demo, seen = models.from_gguf(models.demo_path()), []
    monkeypatch.setattr(demo, "config", dataclasses.replace(demo.config, context_length=longest))
    ids = demo.tokenizer.encode("it was so " * 600, add_special=False)[: 2 * 511]
    monkeypatch.setattr(demo.tokenizer, "encode", lambda *_, **__: ids)
    found = score(demo, "", progress=lambda *call: seen.append(call))
    assert seen[-1] == (windows, windows) and found.tokens == len(ids)


def test_a_model_compiles_once_per_shape_and_is_freed():
    demo = models.from_gguf(models.demo_path())
    short, shorter = score(demo, "it was so"), score(demo, "it was")
    assert shorter.tokens < short.tokens < 8
    programs = len(demo.ready._values)
    assert score(demo, "it was so") == short and len(demo.ready._values) == programs == 2
    score(demo, "it was so " * 30, context=16)
    assert len(demo.ready._values) == 2 * programs
    reference = weakref.ref(demo)
    del demo
    gc.collect()
    assert reference() is None


def test_units():
    found = Score(nats=100 * math.log(2), tokens=50, bytes=200)
    assert found.bits_per_byte == pytest.approx(0.5)
    assert found.perplexity == pytest.approx(4)


def test_progress_counts_windows(model):
    seen = []
    score(model, TEXT, context=8, progress=lambda done, total: seen.append((done, total)))
    assert (
        seen[-1][0]
        == seen[-1][1]
        == math.ceil(len(model.tokenizer.encode(TEXT, add_special=False)) / 7)
    )
    assert len(seen) == math.ceil(seen[-1][1] / 8)


def test_errors(model):
    for context in (1, 0, -3, model.config.context_length + 1):
        with pytest.raises(
            ValueError, match=f"context={context} must be 2 to {model.config.context_length}"
        ):
            score(model, TEXT, context=context)
    with pytest.raises(ValueError, match="too few tokens"):
        score(model, "")
    with pytest.raises(ValueError, match="no tokenizer"):
        score(models.Model(model.decoder()), TEXT)


def test_perplexity_beyond_float64_is_infinite():
    assert Score(nats=7100.0, tokens=10, bytes=40).perplexity == math.inf


#: Final estimates of llama.cpp's `llama-perplexity` (of llama-cpp-python 0.3.36) for
#: examples/lora_text.txt with `-ctk f32 -ctv f32 -fa off -b CONTEXT -c CONTEXT`. The files' weights
#: were converted to F32, since on a CPU it rounds activations to int8 if weights are quantized.
#: (file, context) -> (perplexity, +/-).
OF_LLAMA_CPP = {
    ("demo", 128): (395.5850, 44.94851),
    ("demo", 256): (334.8662, 37.52978),
    ("demo", 512): (364.2603, 41.32364),
    ("text-spm", 128): (1498093046.3018, 204031075.49371),
    ("text-spm", 512): (1746215514.1237, 256296476.74157),
    ("bpe", 128): (290221.7080, 29915.27157),
}


def with_bpe_words(folder, text):
    """The golden Qwen 3 with a byte-level BPE vocabulary trained on a text."""
    file = jq.gguf.read(GOLDEN / "qwen3-qknorm.Q4_K_M.gguf")
    learned = Tokenizer(tokenizers.models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = file.tensors["token_embd.weight"].shape[0]
    options = {"initial_alphabet": alphabet, "show_progress": False}
    learned.train_from_iterator([text], trainers.BpeTrainer(vocab_size=size, **options))
    found = json.loads(learned.to_str())["model"]
    tokens = sorted(found["vocab"], key=found["vocab"].get)
    assert len(tokens) == size and found["merges"][:2] == [["t", "h"], ["\u0120", "th"]]
    words = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.ones(size, np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in found["merges"]],
        "tokenizer.ggml.add_bos_token": False,
    }
    metadata = jq.gguf.Metadata({**file.metadata, **words})
    jq.gguf.write(folder / "bpe.gguf", metadata, dict(file.tensors))
    return models.load(folder / "bpe.gguf")


@pytest.mark.slow("a text of several windows, by llama.cpp")
@pytest.mark.usefixtures("exact")
def test_llama_cpps_perplexity(model, tmp_path):
    """SentencePiece with BOS and byte-level BPE without are within a thousandth of its figures."""
    text = (EXAMPLES / "lora_text.txt").read_text()
    loaded = {"demo": models.load("demo"), "text-spm": model, "bpe": with_bpe_words(tmp_path, text)}
    for (name, context), (perplexity, error) in OF_LLAMA_CPP.items():
        found = score(loaded[name], text, context=context, windows="llama.cpp").second_halves
        assert found.perplexity == pytest.approx(perplexity, rel=1e-5), (name, context)
        assert found.error == pytest.approx(error, rel=1e-4), (name, context)


@pytest.mark.usefixtures("exact")
def test_llama_cpps_windows(model):
    """BOS replaces a window's first token; a partial window at the end is dropped."""
    ids = model.tokenizer.encode(TEXT)
    length = 13
    windows = [[1, *ids[i + 1 : i + length]] for i in range(0, len(ids) - length + 1, length)]
    assert len(ids) % length and len(windows) > 2
    found = score(model, TEXT, context=length, windows="llama.cpp")
    assert found.tokens == len(windows) * (length - 1)
    assert found.nats == pytest.approx(sum(nats(model, window) for window in windows), rel=1e-5)
    halves = found.second_halves
    assert halves.tokens == len(windows) * (length - length // 2 - 1)
    firsts = sum(nats(model, window[: length // 2 + 1]) for window in windows)
    assert halves.nats == pytest.approx(found.nats - firsts, rel=1e-5)
    with pytest.raises(TooShortError, match="text has .* need 200"):
        score(model, TEXT, context=100, windows="llama.cpp")
    with pytest.raises(ValueError, match="windows='other' must be 'whole' or 'llama.cpp'"):
        score(model, TEXT, windows="other")
    with pytest.raises(TypeError, match="context='x' must be an integer"):
        score(model, TEXT, context="x")


def test_standard_errors():
    rng = np.random.default_rng(0)
    values = rng.exponential(2.0, 100)
    found = Score(values.sum(), 100, 1, (values**2).sum())
    assert found.error == pytest.approx(found.perplexity * values.std(ddof=1) / 10)
    assert math.isnan(Score(1.0, 1, 1, 1.0).error) and Score(2.0, 2, 2, 2.0).error == 0
