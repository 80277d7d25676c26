"""Deterministic engines: the same bits alone, in a batch, from cached pages, after preemption."""

from __future__ import annotations

from typing import Any

import pytest

import jax_q4k as jq
from jax_q4k import models, native
from jax_q4k.models.support.assets import demo_path

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

    def alone(prompt: list[int], sampling: models.Sampling) -> models.Output:
        with engine_of(name, activations) as engine:  # without a cached page
            output = engine.generate(prompt, sampling)
            assert engine.stats().reused_tokens == engine.stats().preemptions == 0
            return output

    pairs = list(zip(prompts, samplings, strict=True))
    want = [alone(*pair) for pair in pairs]
    turns = [[*prompts[i], *want[i].tokens, *range(5, 13)] for i in (0, 3)]
    want_turns = [alone(turn, samplings[1]) for turn in turns]
    with engine_of(name, activations) as engine:
        runs = {"in a batch": (engine.generate(prompts, samplings), want)}
        before = engine.stats().reused_tokens
        cached = engine.generate(prompts[::-1], samplings[::-1])[::-1]
        runs["in a batch, cached"] = cached, want
        runs["alone, cached"] = [engine.generate(*pair) for pair in pairs], want
        runs["continued answers"] = engine.generate(turns, [samplings[1]] * 2), want_turns
        assert engine.stats().reused_tokens > before
        assert engine.stats().preemptions == 0
        engine.check()
    with engine_of(name, activations, pages=pages) as engine:
        runs["preempted"] = engine.generate(prompts, samplings), want
        runs["preempted, again"] = engine.generate(prompts, samplings), want
        assert engine.stats().preemptions > 0
        engine.check()
    others = {
        run: differing(list(map(bits_of, got)), list(map(bits_of, wanted)))
        for run, (got, wanted) in runs.items()
    }
    assert not any(others.values()), f"requests with other bits: {others}"


@pytest.mark.slow("compiles and runs programs of sixteen rows")
@pytest.mark.parametrize(
    ("name", "activations"),
    [
        ("llama-gqa", None),
        ("gemma3", "f32"),  # windows
        ("gpt-oss", "f32"),  # experts, sinks
        ("qwen3next", "f32"),  # a recurrent state
        ("deepseek2", "f32"),  # latent attention
    ],
)
def test_bits_do_not_depend_on_other_requests(name: str, activations: str | None) -> None:
    check(name, activations, pages=12)


@pytest.mark.slow("generates sixteen texts several times")
@pytest.mark.skipif(not native.available(), reason=native.problem())
def test_tokens_of_int8_products_do_not_depend_on_other_requests() -> None:
    """The default engine: decode steps of 1 to 16 rows, pieces of any length, cached prefixes."""
    demo = models.load(demo_path())
    prompts = prompts_of(demo, [(16, 48 + i) for i in range(16)])
    samplings = [
        models.Sampling(max_new_tokens=64, ignore_end=True, temperature=0.8 * (i % 2), seed=i)
        for i in range(16)
    ]

    def tokens(rows: int, order: slice, **options: Any) -> list[list[int]]:
        small = {"max_rows": rows, "max_context": 192, "warm_up": False}
        with models.Engine(demo, **(small | options)) as engine:
            outputs = engine.generate(prompts[order], samplings[order])
        return [output.tokens for output in outputs][order]

    want = tokens(1, slice(None))
    for rows, order in ((16, slice(None)), (5, slice(None, None, -1))):
        assert not differing(tokens(rows, order), want), rows
    assert not differing(tokens(6, slice(None), pages=40), want), "with preemptions"
