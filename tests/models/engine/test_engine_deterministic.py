"""Deterministic engines: the same bits alone, in a batch, from cached pages, after preemption."""

from __future__ import annotations

from typing import Any

import pytest

import jax_q4k as jq
from jax_q4k import models

from ..golden_files import model
from .engine_runs import bits_of, differing, prompts_of

#: Prompts longer and shorter than the 64 tokens at whose multiples pieces end.
PARTS = ((64, 20), (0, 70), (64, 50), (0, 9), (64, 20), (32, 33), (0, 64), (128, 5))


def engine_of(name: str, activations: Any, **options: Any) -> models.Engine:
    small = {"max_rows": 4, "max_context": 192, "warm_up": False, "deterministic": True}
    with jq.implementation(activations=activations):
        return models.Engine(model(name), **(small | options))


def check(name: str, activations: str | None, pages: int) -> None:
    """Compares with `==` what the same requests give in different surroundings."""
    prompts = prompts_of(model(name), PARTS)
    samplings = [
        models.Sampling(
            max_new_tokens=30, ignore_end=True, temperature=0.9 * (i % 2), seed=i, logprobs=3
        )
        for i in range(len(prompts))
    ]
    pairs = list(zip(prompts, samplings, strict=True))
    want = []
    for prompt, sampling in pairs:
        with engine_of(name, activations) as engine:  # without a cached page
            want.append(bits_of(engine.generate(prompt, sampling)))
            assert engine.stats().reused_tokens == engine.stats().preemptions == 0
    with engine_of(name, activations) as engine:
        runs = {"in a batch": engine.generate(prompts, samplings)}
        before = engine.stats().reused_tokens
        runs["in a batch, cached"] = engine.generate(prompts[::-1], samplings[::-1])[::-1]
        runs["alone, cached"] = [engine.generate(*pair) for pair in pairs]
        assert engine.stats().reused_tokens > before
        assert engine.stats().preemptions == 0
        engine.check()
    with engine_of(name, activations, pages=pages) as engine:
        runs["preempted"] = engine.generate(prompts, samplings)
        runs["preempted, again"] = engine.generate(prompts, samplings)
        assert engine.stats().preemptions > 0
        engine.check()
    others = {run: differing([bits_of(out) for out in outs], want) for run, outs in runs.items()}
    assert not any(others.values()), f"requests with other bits: {others}"


@pytest.mark.slow("compiles and runs programs of sixteen rows")
@pytest.mark.parametrize("activations", ["f32", None], ids=["f32", "int8"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_bits_do_not_depend_on_other_requests(name: str, activations: str | None) -> None:
    check(name, activations, pages=12)


@pytest.mark.slow("compiles and runs programs of sixteen rows")
@pytest.mark.xfail(reason="an expert's product has as many rows as a batch's tokens choose it")
def test_bits_of_experts() -> None:
    check("gpt-oss", "f32", pages=12)
