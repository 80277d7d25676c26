"""Log-probabilities of prompts, and embeddings, beside other requests of an engine."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from support.helpers import nmse

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.engine.prompt_results import normalized

from ..golden_files import FEATURED, NAMES, model, path
from .engine_runs import (
    Gate,
    alone,
    bits_of,
    exactly,
    is_idle,
    prompts_of,
    samplings_of,
    tokens_of,
    wait_until,
)

#: Pages of two rows that need eight at the end.
FEW_PAGES = 6


def log_p_of(loaded: models.Model, ids: list[int]) -> np.ndarray:
    """Returns the log-probabilities of a full pass, float64 (time, vocab_size)."""
    with jq.implementation(activations="f32"):
        logits = np.asarray(loaded.logits([ids])[0], np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def check_entries(ids: list[int], entries: Any, want: np.ndarray, top: int) -> None:
    """Compares a prompt's entries with the log-probabilities of a full pass."""
    assert len(entries) == len(ids) and entries[0] is None
    for token, one, row in zip(ids[1:], entries[1:], want, strict=False):
        assert one.logprob == pytest.approx(row[token], abs=1e-3)
        assert one.rank == pytest.approx(1 + (row > row[token]).sum(), abs=1)
        likeliest = np.sort(row)[::-1][:top]
        np.testing.assert_allclose([value for _, value in one.top], likeliest, atol=1e-3)
        for other, value in one.top:
            assert value == pytest.approx(row[other], abs=1e-3)
            if other == token:
                assert value == one.logprob and one.rank <= top
    got = np.array([one.logprob for one in entries[1:]])
    assert nmse(got, want[np.arange(len(got)), ids[1:]]) <= 1e-8


@pytest.mark.slow("compiles six programs a model", quick=["gemma2"])
@pytest.mark.parametrize("name", FEATURED)
def test_logprobs_of_prompts_are_those_of_a_full_pass(name: str) -> None:
    """Covers pieces, equal beginnings, preempted prompts, and prompts that are cached."""
    loaded = model(name)
    prompts = prompts_of(loaded)
    samplings = samplings_of(len(prompts), prompt_logprobs=None)
    want = tokens_of(alone(loaded, prompts, samplings))
    # Every third asks for nothing of its prompt, and shares pages with the others.
    asked = [one.replaced(prompt_logprobs=(3, 0, None)[i % 3]) for i, one in enumerate(samplings)]
    log_ps = [log_p_of(loaded, ids) for ids in prompts]
    with exactly(loaded, few_programs=True, pages=FEW_PAGES) as engine:
        for _ in range(2):
            outputs = engine.generate(prompts, asked)
            assert tokens_of(outputs) == want
            for ids, output, one, log_p in zip(prompts, outputs, asked, log_ps, strict=True):
                if one.prompt_logprobs is None:
                    assert output.prompt_logprobs is None
                else:
                    check_entries(ids, output.prompt_logprobs, log_p, one.prompt_logprobs)
                    assert output.timings.reused_tokens == 0
        engine.check()
        stats = engine.stats()
    assert stats.preemptions > 0 and stats.free_pages == stats.pages


def test_a_prompt_alone() -> None:
    """`max_new_tokens=0` samples nothing, in an engine and in `generate`."""
    loaded = model("llama-gqa")
    prompts = prompts_of(loaded, ((0, 40), (0, 1), (0, 17)))
    fields: dict[str, Any] = {"max_new_tokens": 0, "prompt_logprobs": 2}
    with exactly(loaded, few_programs=True, pages=FEW_PAGES) as engine:
        outputs = engine.generate(prompts, **fields)
        pieces = list(engine.submit(prompts[0], **fields))
        wait_until(lambda: is_idle(engine))
    assert len(pieces) == 1 and pieces[0].output is not None and pieces[0].token is None
    assert pieces[0].output.prompt_logprobs == outputs[0].prompt_logprobs
    with jq.implementation(activations="f32"):
        together = models.generate(loaded, prompts, **fields)
    for ids, *found in zip(prompts, outputs, together, strict=True):
        for output in found:
            assert (output.tokens, output.finish_reason) == ([], "length")
            assert output.timings.new_tokens == output.timings.decoded_tokens == 0
            check_entries(ids, output.prompt_logprobs, log_p_of(loaded, ids), 2)
    assert outputs[1].prompt_logprobs == [None]


def test_prompts_that_fill_all_pages_run_together() -> None:
    """A prompt alone needs no further page for a new token."""
    loaded = model("llama-gqa")
    prompts = prompts_of(loaded, ((0, 32), (0, 31), (0, 30)))
    with exactly(loaded, few_programs=True, max_rows=3, pages=6) as engine:
        with Gate(engine) as gate:
            for ids in prompts:
                engine.submit_embedding(ids)
            gate.step()
            wait_until(lambda: engine.stats().running == 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1, or 0 with prompt_logprobs"),
        ({"prompt_logprobs": 21}, r"prompt_logprobs=21 must be int in \[0, 20\]"),
        ({"max_new_tokens": -1, "prompt_logprobs": 0}, "max_new_tokens=-1 must be at least 1"),
    ],
)
def test_numbers_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.Sampling(**fields)


def test_a_preempted_prompt_is_computed_again() -> None:
    """A prompt that loses its pages between two of its pieces has each result once."""
    loaded = model("llama-gqa")
    first, second = prompts_of(loaded, ((0, 31), (0, 300)))
    with jq.implementation(activations="f32"):
        want = models.embed(loaded, second)
    # The prompt's 19 pages leave one for the answer, which needs two while pieces of 16 run.
    for kind in ("logprobs", "embedding"):
        with exactly(loaded, few_programs=True, pages=22, max_context=340) as engine:
            with Gate(engine) as gate:
                early = engine.submit(first, max_new_tokens=40, ignore_end=True)
                if kind == "logprobs":
                    late = engine.submit(second, max_new_tokens=1, prompt_logprobs=1)
                else:
                    late = engine.submit_embedding(second)
                gate.step(21)
            output = late.result()
            assert engine.stats().preemptions == 1 and len(early.result().tokens) == 40
            wait_until(lambda engine=engine: is_idle(engine))  # type: ignore[misc]
        if kind == "logprobs":
            check_entries(second, output.prompt_logprobs, log_p_of(loaded, second), 1)
        else:
            np.testing.assert_allclose(output.embedding, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.slow("compiles programs with at least 16 rows")
def test_bits_in_deterministic_mode() -> None:
    loaded = model("llama-gqa")
    prompts = prompts_of(loaded, ((100, 30), (0, 90), (100, 50), (64, 8)))
    samplings = samplings_of(len(prompts), logprobs=2, prompt_logprobs=2)
    options: Any = {"deterministic": True, "max_context": 192, "pages": 24, "warm_up": False}
    with models.Engine(loaded, max_rows=4, **options) as engine:
        pairs = zip(prompts, samplings, strict=True)
        want = [bits_of(engine.generate(*pair)) for pair in pairs]
        assert list(map(bits_of, engine.generate(prompts, samplings))) == want


@pytest.mark.slow("compiles programs of a draft model")
@pytest.mark.parametrize("draft", ["lookup", "model"])
def test_with_drafts(draft: str) -> None:
    loaded = model("llama-gqa")
    (ids,) = prompts_of(loaded, ((0, 20),))
    with jq.implementation(activations="f32"):
        kind = loaded if draft == "model" else draft
        output = models.generate(loaded, ids, draft=kind, max_new_tokens=5, prompt_logprobs=1)
        want = models.embed(loaded, ids)
    check_entries(ids, output.prompt_logprobs, log_p_of(loaded, ids), 1)
    with exactly(loaded, few_programs=True, draft=kind) as engine:
        found = engine.generate(ids, max_new_tokens=5, prompt_logprobs=1)
        check_entries(ids, found.prompt_logprobs, log_p_of(loaded, ids), 1)
        np.testing.assert_allclose(engine.embed(ids), want, atol=1e-5 * np.abs(want).max())
    assert found.tokens == output.tokens


@pytest.mark.slow("compiles six programs a model", quick=["gemma2"])
@pytest.mark.parametrize("name", FEATURED)
def test_embeddings_are_those_of_embed(name: str) -> None:
    """They run beside answers, in several pieces, and give their pages back."""
    loaded = model(name)
    prompts = prompts_of(loaded)
    samplings = samplings_of(len(prompts))
    with jq.implementation(activations="f32"):
        want = {
            pooling: models.embed(loaded, prompts, pooling=pooling)
            for pooling in ("mean", "last", "cls")
        }
        every = models.embed(loaded, prompts, pooling="none")
    tokens = tokens_of(alone(loaded, prompts, samplings))
    with exactly(loaded, few_programs=True, pages=FEW_PAGES) as engine:
        answers = [engine.submit(*pair) for pair in zip(prompts, samplings, strict=True)]
        for pooling, vectors in want.items():
            found = engine.embed(prompts, pooling=pooling)
            np.testing.assert_allclose(found, vectors, atol=1e-5 * np.abs(vectors).max())
        of_tokens = engine.embed(prompts, pooling="none")
        for got, vectors in zip(of_tokens, every, strict=True):
            np.testing.assert_allclose(got, vectors, atol=1e-5 * np.abs(vectors).max())
        assert [answer.result().tokens for answer in answers] == tokens
        engine.check()
        wait_until(lambda: is_idle(engine))


@pytest.mark.slow("compiles programs for several devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=["1x2", "2x2"])
def test_several_devices(shape: tuple[int, int], kind: AxisType) -> None:
    """Covers rows and vocabularies that are split."""
    loaded = model("llama-gqa")
    prompts = prompts_of(loaded)
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh = jax.make_mesh(shape, ("data", "model"), (kind, kind), devices=devices)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names replicated tensors
        several = models.load(path("llama-gqa"), mesh=mesh)
    with jq.implementation(activations="f32"):
        want = models.embed(loaded, prompts)
        np.testing.assert_allclose(models.embed(several, prompts), want, atol=1e-4)
    options: Any = {"few_programs": True, "max_rows": 2 * shape[0], "pages": FEW_PAGES * shape[0]}
    with exactly(several, **options) as engine:
        outputs = engine.generate(prompts, max_new_tokens=3, prompt_logprobs=2)
        np.testing.assert_allclose(engine.embed(prompts), want, atol=1e-4)
    for ids, output in zip(prompts, outputs, strict=True):
        check_entries(ids, output.prompt_logprobs, log_p_of(loaded, ids), 2)


def test_one_embedding() -> None:
    loaded = model("text-spm")
    with exactly(loaded, few_programs=True) as engine:
        want = engine.embed("The sea", pooling="mean", normalize=False)
        assert want.shape == (loaded.config.hidden_size,)
        request = engine.submit_embedding("The sea", normalize=True, priority=3)
        output = request.result()
        assert output.embedding is not None and output.tokens == []
        np.testing.assert_allclose(output.embedding, normalized(want), rtol=1e-6)
        assert np.linalg.norm(output.embedding) == pytest.approx(1)
        assert engine.embed(["The sea"]).shape == (1, loaded.config.hidden_size)
        cancelled = engine.submit_embedding([5] * 60)
        cancelled.cancel()
        assert cancelled.result().finish_reason == "cancelled"
        wait_until(lambda: is_idle(engine))


@pytest.mark.parametrize(
    ("texts", "options", "error", "message"),
    [
        ([[5] * 65], {}, ValueError, r"texts\[0\] has 65 tokens; the context length is 64"),
        ([5, 10**6], {}, ValueError, "text holds token id 1000000"),
        ([], {}, ValueError, "texts is empty"),
        ([5], {"pooling": "max"}, ValueError, "pooling='max' must be one of"),
    ],
)
def test_embeddings_that_are_refused(
    texts: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with exactly(model(NAMES[0])) as engine:
        with pytest.raises(error, match=message):
            engine.embed(texts, **options)
        with pytest.raises(TypeError, match="text is a list of texts; submit one"):
            engine.submit_embedding([[5], [6]])


def test_vectors_of_length_0() -> None:
    np.testing.assert_array_equal(normalized(np.zeros((2, 4), np.float32)), np.zeros((2, 4)))
