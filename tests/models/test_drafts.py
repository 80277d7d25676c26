"""Drafts: the text is the one without them, in fewer passes where they are right."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import needs_native

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.drafts import DraftModel, PromptLookup

from .golden import model, reference

SAMPLINGS = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "top_k": 12, "seed": 5},
    "penalized": {"temperature": 0.5, "repetition_penalty": 1.3, "seed": 2},
}


@pytest.fixture(autouse=True)
def exact():
    with jq.implementation("native", activations="f32"):
        yield


def by_definition(text, count, longest, shortest):
    """The tokens behind the latest of the longest earlier runs equal to the last tokens."""
    for size in range(longest, shortest - 1, -1):
        for at in range(len(text) - size - 1, -1, -1):
            if text[at : at + size] == text[len(text) - size :]:
                behind = text[at + size :]
                return [behind[i % len(behind)] for i in range(count)]
    return None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=24),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_what_is_looked_up(text, count, shortest, further):
    lookup = PromptLookup(longest=shortest + further, shortest=shortest)
    padded = np.full((1, 24), 2, np.int32)
    padded[0, : len(text)] = text
    drafts, found = lookup.found(jnp.array(padded), jnp.array([len(text)]), count)
    want = by_definition(text, count, lookup.longest, shortest)
    assert bool(found[0]) == (want is not None)
    if want is not None:
        assert drafts[0].tolist() == want


@needs_native
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", ["qwen35", "gemma2"])
def test_tokens_are_those_without_drafts(name, sampling):
    """Rows of two lengths, one of which repeats itself."""
    loaded, prompt = model(name), reference(name).prompt.tolist()
    rows, fields = [prompt[:40], prompt[:11] * 3], SAMPLINGS[sampling] | {"max_new_tokens": 40}
    want = models.generate(loaded, rows, **fields)
    got = models.generate(loaded, rows, draft=PromptLookup(tokens=4, shortest=1), **fields)
    assert [out.tokens for out in got] == [out.tokens for out in want]
    assert got[0].timings.drafted_tokens > 0
    assert 0 <= got[0].timings.accepted_tokens <= got[0].timings.drafted_tokens


@needs_native
@pytest.mark.parametrize("drafter", ["lfm2moe", "qwen35"])
def test_a_draft_model(drafter):
    """Of another kind, which is mostly wrong; and the model itself, which is always right."""
    loaded, prompt = model("qwen35"), reference("qwen35").prompt.tolist()
    want = models.generate(loaded, prompt, max_new_tokens=30)
    got = models.generate(loaded, prompt, draft=DraftModel(model(drafter), 3), max_new_tokens=30)
    assert got.tokens == want.tokens == [*reference("qwen35").greedy, *want.tokens[24:]]
    timings = got.timings
    if drafter == "qwen35":
        assert timings.accepted_tokens == timings.drafted_tokens >= 21
    else:
        assert timings.accepted_tokens < timings.drafted_tokens < 60  # it waits after failures


@needs_native
def test_streams_stop_strings_and_end_tokens():
    loaded = models.load(models.demo_path())
    prompt = "It was a truth, it was a truth, it was a truth, it was"
    for fields in ({}, {"stop": "th"}, {"ignore_end": True, "max_new_tokens": 90}):
        options = {"max_new_tokens": 24} | fields
        want = models.generate(loaded, prompt, **options)
        got = models.generate(loaded, prompt, draft="lookup", **options)
        assert (got.tokens, got.text, got.finish_reason) == (
            want.tokens,
            want.text,
            want.finish_reason,
        )
        pieces = list(models.stream(loaded, prompt, draft="lookup", **options))
        assert "".join(piece.text for piece in pieces) == want.text
        assert [p.token for p in pieces if p.token is not None] == want.tokens


def test_bad_drafts():
    loaded = model("llama-gqa")
    with pytest.raises(TypeError, match="draft is 'ngram'; it must be 'lookup', a Model, or one"):
        models.generate(loaded, [1], draft="ngram")
    with pytest.raises(ValueError, match="draft has a vocabulary of 272 tokens, the model one"):
        models.generate(loaded, [1], draft=model("lfm2"))
    with pytest.raises(ValueError, match="tokens=64 must be 1 to 63"):
        PromptLookup(tokens=64)
    with pytest.raises(ValueError, match="shortest=3 and longest=2 must be"):
        PromptLookup(longest=2, shortest=3)
