"""Speculative decoding: output is unchanged, and accepted drafts save passes."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import nmse
from support.implementations import needs_native

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.kv_cache import PagedCache
from jax_q4k.models.runner.speculative.drafts import DraftModel, PromptLookup
from jax_q4k.models.runner.speculative.mtp import Drafter
from jax_q4k.models.runner.speculative.state import State
from jax_q4k.models.runner.speculative.verify import LOSS, MOST_CREDIT, Speculation, begin
from jax_q4k.models.sampling import Sampling
from jax_q4k.models.sampling.sampler import sample
from jax_q4k.models.sampling.stages import SamplingArrays, SamplingStages

from ..golden_files import model, path, reference

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
    """Tokens after the latest occurrence of the longest suffix that occurs before."""
    for size in range(longest, shortest - 1, -1):
        for at in range(len(text) - size - 1, -1, -1):
            if text[at : at + size] == text[len(text) - size :]:
                behind = text[at + size :]
                return [behind[i % len(behind)] for i in range(count)]
    return None


@pytest.mark.slow("draws two hundred texts")
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=24),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_prompt_lookup(text, count, shortest, further):
    lookup = PromptLookup(longest=shortest + further, shortest=shortest)
    padded = np.full((1, 24), 2, np.int32)
    padded[0, : len(text)] = text
    drafts, found = lookup.found(jnp.array(padded), jnp.array([len(text)]), count)
    want = by_definition(text, count, lookup.longest, shortest)
    assert bool(found[0]) == (want is not None)
    if want is not None:
        assert drafts[0].tolist() == want


@pytest.mark.slow("compiles three programs a case")
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


@pytest.mark.slow("compiles programs of two models")
@needs_native
@pytest.mark.parametrize("drafter", ["lfm2moe", "qwen35"])
def test_a_draft_model(drafter):
    """A draft model of another kind is mostly wrong; the model itself is always right."""
    loaded, prompt = model("qwen35"), reference("qwen35").prompt.tolist()
    want = models.generate(loaded, prompt, max_new_tokens=30)
    got = models.generate(loaded, prompt, draft=DraftModel(model(drafter), 3), max_new_tokens=30)
    assert got.tokens == want.tokens == [*reference("qwen35").greedy, *want.tokens[24:]]
    timings = got.timings
    if drafter == "qwen35":
        assert timings.accepted_tokens == timings.drafted_tokens >= 21
    else:
        assert timings.accepted_tokens < timings.drafted_tokens < 60  # it pauses after failures


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lengths:
    """The cache of a `Table` or `Layer`."""

    context_lens: jax.Array


class Table(NamedTuple):
    """A decoder whose logits depend only on the last token."""

    rows: jax.Array

    def decode_vectors(self, tokens, cache, active):
        return tokens, Lengths(cache.context_lens + active)

    def try_tokens(self, tokens, lengths, cache):
        return tokens, lambda counts: Lengths(cache.context_lens + counts)

    def logits(self, vectors):
        return self.rows[vectors]


def one_by_one(rows, text, sampling, count):
    """Argmax tokens from a `Table`'s rows, with penalties on tokens that occurred."""
    text, first = list(text), len(text)
    for _ in range(count):
        there = np.bincount(text, minlength=len(rows))
        logits = rows[text[-1]] - sampling.frequency_penalty * there
        text.append(int(np.argmax(logits - sampling.presence_penalty * (there > 0))))
    return text[first:]


def test_drafts_with_penalties():
    """Drafted tokens count in later penalties; rows are drafted and accepted independently."""
    rng, size, capacity, count = np.random.default_rng(3), 9, 64, 30
    rows = 3 * np.roll(np.eye(size), 1, axis=1) + rng.uniform(0, 2.5, (size, size))
    texts = [[*range(6)] * 2, [7, 8, 0, 7]]
    sampling = Sampling(frequency_penalty=0.7, presence_penalty=0.1, max_new_tokens=count)
    text, seen = np.zeros((2, capacity), np.int32), np.zeros((2, size), np.int32)
    for row, tokens in enumerate(texts):
        text[row, : len(tokens)] = tokens
        seen[row] = np.bincount(tokens, minlength=size)
    state = State(
        cache=Lengths(np.array([len(tokens) - 1 for tokens in texts], np.int32)),
        token=np.array([tokens[-1] for tokens in texts], np.int32),
        tokens=np.zeros((2, capacity), np.int32),
        counts=np.zeros(2, np.int32),
        finished=np.zeros(2, bool),
        step=np.int32(0),
        seen=seen,
        history=text,
        speculation=begin(2, 3, None),
    )
    stages, parameters = SamplingStages.of([sampling]), SamplingArrays.of([sampling] * 2)

    def choose(logits, parameters, steps, read):
        return sample(logits, stages, parameters, steps, *read()), None

    given = choose, parameters, Table(jnp.array(rows))
    steps = Speculation(PromptLookup(shortest=1), 3, 1.0, *given)
    state = jax.jit(steps.run)(state, np.int32(count))
    for row, tokens in enumerate(texts):
        want = one_by_one(rows, tokens, sampling, count)
        assert state.tokens[row, :count].tolist() == want
    accepted, drafted = state.speculation.accepted.tolist(), state.speculation.drafted.tolist()
    assert all(10 <= right < tried for right, tried in zip(accepted, drafted, strict=True))


def test_the_credit_of_drafts():
    """Failed drafts spend credit, accepted ones earn it, and failures stay below their share."""
    given = {"choose": None, "parameters": None, "decoder": None}
    steps = Speculation(PromptLookup(), tokens=3, cost=1.5, **given)
    active, none = jnp.ones(2, bool), jnp.zeros(2, jnp.int32)

    def tries(speculation, passes, stayed):
        found = 0
        for _ in range(passes):
            checks = bool(speculation.credit >= 0)
            found += checks
            right = none + stayed if checks else none
            given = speculation, none + 3 * checks, right, active
            speculation = steps._update_credit(*given, checks=checks)
        assert speculation.accepted.tolist() == [found * stayed] * 2
        assert speculation.drafted.tolist() == [found * 3] * 2
        return found, dataclasses.replace(speculation, accepted=none, drafted=none)

    first = begin(2, 3, None)
    found, failing = tries(first, 1000, 0)
    assert 2 + 1000 * LOSS / 1.5 - 2 <= found <= 2 + 1000 * LOSS / 1.5
    found, failing = tries(failing, 1000, 0)
    assert found <= 1000 * LOSS / 1.5 + 1
    found, right = tries(first, 50, 3)
    assert found == 50 and right.credit == MOST_CREDIT
    found, _ = tries(right, 20, 0)
    assert found == MOST_CREDIT + 1


@pytest.mark.slow("compiles a program for each way of stopping")
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


def vectors_by_definition(weights, embedding, tokens, vectors):
    """Computes normalized hidden states of a multi-token-prediction layer in float64.

    The pairs of tokens and vectors are (time, ...).
    """
    w = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    time, heads, kv_heads, dim, turned = len(tokens), 4, 2, 64, 16

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[weight]

    def rotated(x):
        angle = np.arange(time)[:, None, None] * 1e7 ** (-np.arange(turned // 2) / (turned // 2))
        pairs = (x[..., : turned // 2] + 1j * x[..., turned // 2 : turned]) * np.exp(1j * angle)
        return np.concatenate([pairs.real, pairs.imag, x[..., turned:]], axis=-1)

    pairs = [norm(embedding[tokens], "enorm"), norm(vectors, "hnorm")]
    x = np.concatenate(pairs, axis=-1) @ w["eh_proj"].T
    h = norm(x, "blk.0.attn_norm.weight")
    q, gate = np.split((h @ w["blk.0.attn_q.weight"].T).reshape(time, heads, 2 * dim), 2, axis=-1)
    k, v = (
        (h @ w[f"blk.0.attn_{part}.weight"].T).reshape(time, kv_heads, dim) for part in ("k", "v")
    )
    q = rotated(norm(q, "blk.0.attn_q_norm.weight"))
    k = np.repeat(rotated(norm(k, "blk.0.attn_k_norm.weight")), heads // kv_heads, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) * dim**-0.5
    scores = np.where(np.tri(time, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    out = np.einsum("hqk,khd->qhd", shares, np.repeat(v, heads // kv_heads, axis=1))
    out = (out / (1 + np.exp(-gate))).reshape(time, -1)
    x = x + out @ w["blk.0.attn_output.weight"].T
    h = norm(x, "blk.0.post_attention_norm.weight")
    gate, up = (h @ w[f"blk.0.ffn_{part}.weight"].T for part in ("gate", "up"))
    x = x + (gate / (1 + np.exp(-gate)) * up) @ w["blk.0.ffn_down.weight"].T
    return norm(x, "shared_head_norm")


@pytest.mark.slow("compiles each part of a layer by itself")
@needs_native
def test_a_layer_of_further_tokens_is_its_definition():
    """A prompt's pairs in one pass, then several more pairs, then one."""
    layer, trunk = models.load_nextn(path("qwen35-mtp")), model("qwen35-mtp").decoder()
    drafter = layer.drafter(layer.weights, trunk)
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 272, (1, 20)).astype(np.int32)
    vectors = rng.standard_normal((1, 20, 256)).astype(np.float32)
    dense = {
        name: w.dequantize() if isinstance(w, jq.QuantizedArray) else w
        for name, w in layer.weights.items()
    }
    embedding = np.asarray(trunk.embedding.get_value().dequantize(), np.float64)
    want = vectors_by_definition(dense, embedding, tokens[0], vectors[0])
    cache = PagedCache.create(layer.config, 1, 32)
    got, cache = drafter.begin(tokens[:, :12], vectors[:, :12], jnp.array([12]), cache)
    assert nmse(got[0], want[11]) <= 1e-10
    got, cache = drafter.follow(tokens[:, 12:], vectors[:, 12:], jnp.array([7]), cache)
    assert nmse(got[0], want[18]) <= 1e-10
    got, cache = drafter.follow(tokens[:, 19:], vectors[:, 19:], jnp.array([1]), cache)
    assert nmse(got[0], want[19]) <= 1e-10 and cache.context_lens.tolist() == [20]


@pytest.mark.slow("compiles three programs")
@needs_native
@pytest.mark.parametrize("sampling", ["greedy", "drawn"])
def test_drafts_of_the_file_s_own_layer(sampling):
    loaded, prompt = model("qwen35-mtp"), reference("qwen35-mtp").prompt.tolist()
    rows, fields = [prompt, prompt[:9]], SAMPLINGS[sampling] | {"max_new_tokens": 30}
    want = models.generate(loaded, rows, **fields)
    draft = models.load_nextn(path("qwen35-mtp"), tokens=2)
    got = models.generate(loaded, rows, draft=draft, **fields)
    assert [out.tokens for out in got] == [out.tokens for out in want]
    assert got[0].timings.drafted_tokens >= 4


class Layer(NamedTuple):
    """A multi-token-prediction layer that returns its input."""

    rows: np.ndarray

    def embedded(self, tokens):
        return jnp.asarray(self.rows)[tokens]

    def decode_vectors(self, tokens, cache, active, given):
        return given, Lengths(cache.context_lens + active)

    def norm(self, vectors):
        return vectors

    output = norm


def test_drafts_go_on_from_drafts():
    """Each draft's hidden state comes from the previous draft and the hidden state before it."""
    rows = np.random.default_rng(4).uniform(-1, 1, (7, 7)).astype(np.float32)
    same = lambda vectors: vectors  # noqa: E731
    drafter = Drafter(Layer(rows), lambda both: both[..., :7] + both[..., 7:] / 2, same, same)
    given, lens, active = rows[:3] * 2, np.array([5, 9, 1], np.int32), np.array([True, False, True])
    run = jax.jit(drafter.drafts, static_argnums=2)
    drafts, cache = run(given, Lengths(lens), 5, active)
    want = []
    for _ in range(5):
        want.append(given.argmax(-1))
        given = rows[want[-1]] + given / 2
    np.testing.assert_array_equal(drafts, np.stack(want, axis=1))
    np.testing.assert_array_equal(cache.context_lens, lens)


def test_files_without_a_layer_of_further_tokens():
    with pytest.raises(jq.GGUFError, match="qwen35.nextn_predict_layers: is 0; drafts need one"):
        models.load_nextn(path("qwen35"))
    with pytest.raises(ValueError, match="draft is the layer of another model: its architecture"):
        models.generate(model("lfm2"), [1], draft=models.load_nextn(path("qwen35-mtp")))


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
