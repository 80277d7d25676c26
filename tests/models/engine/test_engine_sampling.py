"""Sampling parameters in an engine: each request gets what it gets alone, in any batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_q4k as jq
from jax_q4k import models

from ..golden_files import model, reference
from .engine_runs import alone, differing, exactly, is_idle, prompts_of, tokens_of, wait_until


@pytest.fixture(scope="module")
def engine() -> Iterator[models.Engine]:
    with exactly(model("llama-gqa"), max_context=96) as made:
        yield made
        wait_until(lambda: is_idle(made))
        made.check()


def without_sevens(logits: jax.Array, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Excludes token 7 and the second-to-last token."""
    return logits.at[jnp.array([7, tokens[length - 2]])].set(-jnp.inf)


def only_new(logits: jax.Array, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Excludes all tokens of the text so far."""
    valid = jnp.arange(tokens.shape[0]) < length
    return logits.at[jnp.where(valid, tokens, logits.shape[0])].set(-jnp.inf, mode="drop")


#: Sampling parameters that the programs of the warm-up have.
STANDARD: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "top_k": {"temperature": 0.7, "top_k": 5},
    "top_p": {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"temperature": 0.9, "repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.7, "presence_penalty": 0.4},
    "new only": {"presence_penalty": 0.7, "repetition_penalty": 1.2, "penalize_new_only": True},
    "biased": {"logit_bias": {7: 4.0, 9: -math.inf}},
    "many biases": {"logit_bias": dict.fromkeys(range(1, 141, 2), 2.5)},
    "logprobs": {"temperature": 0.5, "logprobs": 20},
}
#: Those that get programs of their own.
OTHERS: dict[str, dict[str, Any]] = {
    "dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": ()},
    "more logprobs": {"temperature": 0.5, "logprobs": 40},
    "processor": {"temperature": 1.0, "processors": (without_sevens,)},
    "processors": {"processors": (without_sevens, only_new)},
}
ALL = STANDARD | OTHERS


def sampling_of(name: str, count: int = 20) -> models.Sampling:
    options = {"max_new_tokens": count, "ignore_end": True, "seed": len(name)}
    return models.Sampling(**(options | ALL[name]))


def same_logprobs(got: models.Output, want: models.Output) -> None:
    """Checks that log-probabilities equal those of `models.generate` up to rounding."""
    assert (got.logprobs is None) == (want.logprobs is None)
    for a, b in zip(got.logprobs or [], want.logprobs or [], strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert len(a.top) == len(b.top)
        np.testing.assert_allclose([p for _, p in a.top], [p for _, p in b.top], atol=1e-4)


@pytest.mark.slow("compiles a program for each", quick=["repetition", "logprobs", "many biases"])
@pytest.mark.parametrize("name", ALL)
def test_each(engine: models.Engine, name: str) -> None:
    """Covers a prompt that is computed and one whose first tokens are cached."""
    prompts = prompts_of(engine.model, ((48, 5), (48, 9)), seed=[*ALL].index(name))
    samplings = [sampling_of(name)] * 2
    want = alone(engine.model, prompts, samplings)
    for cached in (0, 48):
        for i, (prompt, one) in enumerate(zip(prompts, samplings, strict=True)):
            got = engine.generate(prompt, one)
            assert got.timings.reused_tokens == (48 if i else cached)
            assert got.tokens == want[i].tokens
            same_logprobs(got, want[i])


def test_penalties_count_cached_tokens(engine: models.Engine) -> None:
    """Tokens of a cached prefix count like those of the prompt's rest."""
    (prompt,) = prompts_of(engine.model, [(48, 5)], seed=77)
    prompt[:40] = [prompt[0]] * 40
    options: dict[str, Any] = {"max_new_tokens": 1, "logprobs": 0, "ignore_end": True}
    free = engine.generate(prompt, **options).tokens[0]
    prompt[3] = free
    assert engine.generate(prompt, max_new_tokens=1, ignore_end=True).timings.reused_tokens == 0
    penalties: list[dict[str, Any]] = [{"presence_penalty": 100.0}, {"frequency_penalty": 100.0}]
    for penalty in penalties:
        engine.generate([free + 1], max_new_tokens=1)  # now its slot has counted another text
        out = engine.generate(prompt, **options, **penalty)
        assert out.timings.reused_tokens == 48
        assert not {*out.tokens} & {*prompt}
        out = engine.generate(prompt, **(options | {"max_new_tokens": 20}), **penalty)
        assert len({*out.tokens}) == 20 and not {*out.tokens} & {*prompt}


def test_new_tokens_alone_are_penalized(engine: models.Engine) -> None:
    """Compares with a function that excludes new tokens; also behind a cached prefix."""
    (prompt,) = prompts_of(engine.model, [(0, 50)], seed=78)

    def unlike_new(logits: jax.Array, tokens: jax.Array, length: jax.Array) -> jax.Array:
        at = jnp.arange(tokens.shape[0])
        new = (at >= len(prompt)) & (at < length)
        return logits.at[jnp.where(new, tokens, logits.shape[0])].add(-50.0, mode="drop")

    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_end": True}
    want = engine.generate(prompt, processors=(unlike_new,), **options).tokens
    assert {*want} & {*prompt} and len({*want}) == 30
    for penalty in ("presence_penalty", "frequency_penalty"):
        engine.generate(want, max_new_tokens=1)  # now its slot has counted another text
        out = engine.generate(prompt, **options, **{penalty: 50.0}, penalize_new_only=True)
        assert out.tokens == want and out.timings.reused_tokens == 48
        assert engine.generate(prompt, **options, **{penalty: 50.0}).tokens != want


@pytest.mark.slow("compiles a program for each combination")
@pytest.mark.parametrize("pages", [24, 8], ids=["many pages", "few pages"])
def test_all_kinds_in_a_batch(pages: int) -> None:
    """Requests of all kinds do not change each other's tokens; preemption does not either."""
    loaded = model("llama-gqa")
    parts = [(16 * (i % 3), 5 + i) for i in range(len(ALL))]
    prompts = prompts_of(loaded, parts)
    samplings = [sampling_of(name, 24 + i) for i, name in enumerate(ALL)]
    want = alone(loaded, prompts, samplings)
    with exactly(loaded, max_rows=4, max_context=96, pages=pages) as engine:
        for order in (range(len(ALL)), range(len(ALL))[::-1]):
            chosen = [(prompts[i], samplings[i]) for i in order]
            outs = engine.generate(*map(list, zip(*chosen, strict=True)))
            wrong = differing(tokens_of(outs), [want[i].tokens for i in order])
            assert not wrong, [list(ALL)[order[i]] for i in wrong]
            for i, out in zip(order, outs, strict=True):
                same_logprobs(out, want[i])
        assert (engine.stats().preemptions > 0) == (pages == 8)
        engine.check()


@pytest.mark.slow("compiles programs on demand")
def test_programs_on_demand() -> None:
    """Stages beyond those of the usual programs are compiled once, and not again."""
    with exactly(model("llama-gqa"), max_rows=1) as engine:
        prompt = [1, 2, 3]

        def compiled(name: str) -> int:
            before = engine.stats().compilations
            engine.generate(prompt, sampling_of(name))
            return engine.stats().compilations - before

        assert compiled("greedy") == 2  # a prefill and a decode program
        assert [compiled(name) for name in STANDARD] == [0] * len(STANDARD)
        # DRY, more log-probabilities and functions; each in both programs.
        assert [compiled(name) for name in OTHERS] == [2] * len(OTHERS)
        assert [compiled(name) for name in ALL] == [0] * len(ALL)


@pytest.mark.slow("compiles all programs of an engine")
@pytest.mark.parametrize("name", ["llama-bias", "lfm2"])
def test_nothing_is_compiled_after_the_warm_up(name: str) -> None:
    """Prompts of all lengths, cached or not, preempted, cancelled, in batches of all sizes."""
    loaded = model(name)
    count = [0]

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        count[0] += event == "/jax/core/compile/backend_compile_duration"

    with exactly(loaded, max_rows=5, max_context=300, pages=40, warm_up=True) as engine:
        assert engine.stats().compilations == 0
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            parts = [(0, n) for n in (1, 15, 16, 17, 63, 64, 65, 130, 250)]
            parts += [(64, 3), (64, 30), (200, 20), (200, 9), (64, 3)]
            prompts = prompts_of(loaded, parts)
            kinds = [*STANDARD] * 2
            samplings = [
                dataclasses.replace(sampling_of(kind, 40))
                for kind, _ in zip(kinds, prompts, strict=False)
            ]
            for rows in (1, 2, 3, 4, len(prompts)):
                engine.generate(prompts[-rows:], samplings[-rows:])
            requests = [engine.submit(*pair) for pair in zip(prompts, samplings, strict=True)]
            for request in requests[::2]:
                request.cancel()
            for request in requests:
                request.result(60)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        stats = engine.stats()
        assert stats.compilations == 0 and count == [0]
        assert stats.reused_tokens > 0 and stats.preemptions > 0
        engine.check()


def test_logprobs_are_of_the_models_logits(engine: models.Engine) -> None:
    """Compares with logits of one pass over the whole text."""
    prompt = reference("llama-gqa").prompt[:20].tolist()
    out = engine.generate(prompt, sampling_of("logprobs"), logit_bias={3: 5.0}, logprobs=5)
    with jq.implementation(activations="f32"):
        logits = np.asarray(engine.model.logits([prompt + out.tokens])[0], np.float64)[19:-1]
    want = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert out.logprobs is not None and len(out.logprobs) == 20
    for token, row, got in zip(out.tokens, want, out.logprobs, strict=True):
        assert got.logprob == pytest.approx(row[token], abs=1e-4)
        assert [token for token, _ in got.top] == np.argsort(-row)[:5].tolist()
