"""Scores of texts: against log-softmax in float64 of the full pass's logits."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref

import numpy as np
import pytest
from helpers import GOLDEN

from jax_q4k import models
from jax_q4k.models.perplexity import Score, score

pytestmark = pytest.mark.cpu_kernels

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
    assert found.bytes == len((" " + TEXT).encode())  # SentencePiece puts a space before a text
    assert found.nats == pytest.approx(sum(nats(model, window) for window in windows), rel=1e-5)


@pytest.mark.usefixtures("exact")
def test_without_bos_a_windows_first_token_is_context_only(model, monkeypatch):
    monkeypatch.setattr(
        model.tokenizer,
        "vocabulary",
        dataclasses.replace(model.tokenizer.vocabulary, add_bos=False),
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


def test_a_model_compiles_once_per_shape_and_is_not_kept():
    demo = models.from_gguf(models.demo_path())
    short, shorter = score(demo, "it was so"), score(demo, "it was")
    assert shorter.tokens < short.tokens < 8
    program = demo.programs().score
    assert program._cache_size() == 1
    assert score(demo, "it was so") == short
    score(demo, "it was so " * 30, context=16)
    assert program._cache_size() == 2
    reference = weakref.ref(demo)
    del demo, program
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
