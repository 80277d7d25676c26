"""Speculative decoding of an engine: each request's tokens are those without drafts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from support.helpers import nmse

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.sampling import Constraint

from ..golden_files import model, path
from .engine_runs import bits_of, exactly, is_idle, tokens_of
from .test_adapters import files

LOOKUP = models.drafts.PromptLookup(tokens=3, shortest=1)
REPETITIVE = [7, 8, 9] * 8
FIELDS: dict[str, Any] = {"max_new_tokens": 24, "ignore_end": True}


def never(engine: models.Engine) -> None:
    """Makes drafts cost more than they can save."""
    engine._loop.stepper.draft_costs = {2**31: math.inf}


def always(engine: models.Engine) -> None:
    """Makes drafts cost nearly nothing."""
    engine._loop.stepper.draft_costs = {2**31: 0.01}


def drafted(output: models.Output) -> int:
    return output.timings.drafted_tokens


def test_each_request_chooses() -> None:
    loaded = model("llama-gqa")
    with exactly(loaded) as engine:
        want = engine.generate(REPETITIVE, **FIELDS)
    with exactly(loaded, draft=LOOKUP) as engine:
        requests = [engine.submit(REPETITIVE, drafts=drafts, **FIELDS) for drafts in (True, False)]
        outputs = [request.result() for request in requests]
        assert tokens_of(outputs) == [want.tokens] * 2
        assert drafted(outputs[0]) > 0 == drafted(outputs[1])
        steps = engine.stats().steps
        alone = engine.submit(REPETITIVE, drafts=False, **FIELDS).result()
        assert alone.tokens == want.tokens and drafted(alone) == 0
        assert engine.stats().steps > steps and is_idle(engine)


def test_drafts_that_do_not_pay_are_left_out() -> None:
    """The engine decides at each step."""
    loaded = model("llama-gqa")
    with exactly(loaded, draft=LOOKUP) as engine:
        never(engine)
        off = engine.generate(REPETITIVE, **FIELDS)
        assert drafted(off) == 0
        always(engine)
        on = engine.generate(REPETITIVE, **FIELDS)
        assert drafted(on) > 0 and on.tokens == off.tokens
        both = engine.generate([REPETITIVE, [5, 6] * 9], **FIELDS)
        assert both[0].tokens == off.tokens and is_idle(engine)


def test_steps_get_more_tokens_than_they_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step continues behind the drafts that were right."""
    loaded = model("llama-gqa")
    with exactly(loaded, draft=LOOKUP) as engine:
        monkeypatch.setattr(engine._loop, "_steps", lambda: 2)
        never(engine)
        want = engine.generate(REPETITIVE, **FIELDS)
        always(engine)
        got = engine.generate(REPETITIVE, **FIELDS)
        assert got.tokens == want.tokens and got.timings.accepted_tokens > 0
        assert is_idle(engine)
        engine.check()


@pytest.mark.slow("compiles programs of a draft model and of an MTP layer")
@pytest.mark.parametrize("name", ["llama-gqa", "qwen35-mtp"])
def test_steps_without_drafts_run_the_drafter(name: str) -> None:
    """So drafts are as right after such steps as they would be without them."""
    loaded = model(name)
    if name == "llama-gqa":
        draft: Any = models.drafts.DraftModel(loaded, 3)  # always right
    else:
        draft = models.load_nextn(path(name), tokens=2)

    def run(off_first: bool) -> tuple[list[int], models.Output, Any]:
        with exactly(loaded, draft=draft, max_context=96) as engine:
            (never if off_first else always)(engine)
            first = engine.generate(REPETITIVE, max_new_tokens=41, ignore_end=True)
            always(engine)
            output = engine.generate([*REPETITIVE, *first.tokens], **FIELDS)
            if off_first:
                assert output.timings.reused_tokens == 64
            state = engine._loop.stepper.executor.state
            assert state is not None and state.draft is not None
            return first.tokens, output, state.draft.vector

    (first, output, vector), (want_first, want, want_vector) = run(True), run(False)
    assert (first, output.tokens) == (want_first, want.tokens)
    assert drafted(output) > 0 and drafted(want) > 0
    if name == "llama-gqa":
        assert output.timings.accepted_tokens == drafted(output)
    else:
        assert nmse(np.asarray(vector), np.asarray(want_vector, np.float64)) <= 1e-8


@pytest.mark.slow("compiles all programs of a small engine")
def test_everything_is_compiled_before_the_first_request() -> None:
    demo = models.load("demo")
    options: dict[str, Any] = {"max_context": 160, "warm_up": True, "constraints": True}
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.7, "top_p": 0.9, "seed": 3},
        {"repetition_penalty": 1.2, "logprobs": 2, "logit_bias": {5: 1.0}},
        {"constraint": Constraint.regex("[a-z ]{30}")},
    )
    prompts = ["It was a truth, it was a truth, it was", "The sea"]
    with exactly(demo, **options) as engine:
        want = [engine.generate(prompts, **FIELDS | way) for way in ways]
    with exactly(demo, draft="lookup", **options) as engine:
        costs = engine._loop.stepper.draft_costs
        assert list(costs) == [1, 2] and all(cost >= 0 for cost in costs.values())
        for count in (2, 1):
            for way, expected in zip(ways, want, strict=True):
                outputs = engine.generate(prompts[:count], **FIELDS | way)
                if "logprobs" not in way:
                    assert tokens_of(outputs) == tokens_of(expected[:count])
        assert engine.stats().compilations == 0 and is_idle(engine)


def test_constrained_requests_beside_drafts() -> None:
    """A step with constrained rows has no drafts."""
    demo, number = models.load("demo"), Constraint.regex("[1-9][0-9]{20,30}")
    prompts = ["It was a truth, it was a truth, it was a truth, it was", "The number is "]
    fields = {"max_new_tokens": 40, "seed": 2, "temperature": 0.1}
    samplings = [models.Sampling(**fields, constraint=one) for one in (None, number)]
    with exactly(demo, few_programs=True, max_context=160) as engine:
        want = engine.generate(prompts, samplings)
    with exactly(demo, few_programs=True, max_context=160, draft=LOOKUP) as engine:
        always(engine)
        got = engine.generate(prompts, samplings)
        assert tokens_of(got) == tokens_of(want)
        assert drafted(got[1]) == 0
        assert drafted(engine.generate(prompts[0], samplings[0])) > 0


@pytest.mark.slow("compiles programs with adapters and drafts", quick=["lookup"])
@pytest.mark.parametrize("kind", ["lookup", "model"])
def test_adapters_with_drafts(kind: str) -> None:
    """Drafts are verified by the request's own adapter."""
    loaded = model("llama-gqa")
    adapter = models.read_lora(files("llama-gqa")["a"], loaded.config)

    def run(draft: Any) -> list[models.Output]:
        options = {"max_adapters": 1, "max_adapter_rank": adapter.rank, "draft": draft}
        with exactly(loaded, few_programs=True, **options) as engine:
            engine.load_adapter("a", adapter)
            always(engine)
            outputs = engine.generate([REPETITIVE] * 2, adapter=["a", None], **FIELDS)
            assert is_idle(engine)
            return list(outputs)

    want = tokens_of(run(None))
    assert want[0] != want[1]
    outputs = run(LOOKUP if kind == "lookup" else models.drafts.DraftModel(loaded, 3))
    assert tokens_of(outputs) == want and drafted(outputs[1]) > 0


@pytest.mark.slow("compiles deterministic programs")
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_drafts_of_a_deterministic_engine_change_no_bit(name: str) -> None:
    """Activations are int8, as by default."""
    loaded = model(name)
    prompts = [REPETITIVE, [5, 6, 7, 8], [9, 9, 10] * 9]
    sampling = models.Sampling(logprobs=2, **FIELDS)
    options: dict[str, Any] = {"max_rows": 4, "max_context": 64, "warm_up": False}
    with jq.implementation(activations="q8_1"):
        with models.Engine(loaded, deterministic=True, **options) as engine:
            want = engine.generate(prompts, sampling)
        with models.Engine(loaded, deterministic=True, draft=LOOKUP, **options) as engine:
            always(engine)
            got = engine.generate(prompts, sampling)
            assert sum(map(drafted, got)) > 0
            assert [bits_of(one) for one in got] == [bits_of(one) for one in want]


@pytest.mark.parametrize("name", ["qwen35", "mixtral"])
def test_layers_that_round_drafts_in_another_way(name: str) -> None:
    with pytest.raises(ValueError, match="deterministic cannot be combined with draft: recurrent"):
        models.Engine(model(name), deterministic=True, draft="lookup")


@pytest.mark.slow("compiles programs with drafts")
def test_snapshots_of_recurrent_states_beside_drafts() -> None:
    """Steps without drafts store them, so that a further turn continues behind the answer."""
    loaded = model("qwen35")
    prompt = [int(token) for token in np.random.default_rng(0).integers(3, 250, 40)]
    with exactly(loaded, draft=LOOKUP, max_context=512) as engine:
        never(engine)
        first = engine.generate(prompt, max_new_tokens=300, ignore_end=True)
        turn = [*prompt, *first.tokens, 5, 6]
        again = engine.generate(turn, **FIELDS)
        assert again.timings.reused_tokens >= 256
        always(engine)
        drafting = engine.generate(turn, **FIELDS)
        assert drafting.tokens == again.tokens and is_idle(engine)
