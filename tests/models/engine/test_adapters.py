"""LoRA adapters of an engine: each request has its own, in one batch."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

import jax_q4k as jq
from jax_q4k import models

from ..adapters import random_pairs, write_gguf, write_peft
from ..golden_files import model
from .engine_runs import (
    Gate,
    alone,
    bits_of,
    differing,
    exactly,
    is_idle,
    prompts_of,
    samplings_of,
    tokens_of,
    wait_until,
)

#: Names of four adapters, and of none.
NAMES = ("a", "b", "c", "d", None)


@functools.cache
def files(name: str) -> dict[str, Path]:
    """Returns four adapters of a model: of all matrices, some, or one, with other ranks."""
    folder, given = Path(tempfile.mkdtemp()), model(name)
    found = {}
    for seed, key in enumerate("abcd"):
        pairs = random_pairs(given, seed=seed)
        pairs.pop("output.weight", None)
        if key == "b":
            pairs = {n: pair for n, pair in pairs.items() if "attn_" in n or "shortconv" in n}
        if key == "c":
            pairs = {n: (a[:1], b[:, :1]) for n, (a, b) in pairs.items()}
        found[key] = write_gguf(folder / f"{key}.gguf", given, pairs)
    return found


def adapter(name: str, key: str) -> models.Adapter:
    return models.read_lora(files(name)[key], model(name).config)


@functools.cache
def adapted(name: str, key: str | None) -> models.Model:
    return model(name) if key is None else models.with_lora(model(name), files(name)[key])


def wanted(name: str, keys: list[str | None], prompts: Any, samplings: Any) -> list[list[int]]:
    """Returns the tokens of each prompt alone, of models that have the adapters."""
    each = zip(keys, prompts, samplings, strict=True)
    return [tokens_of(alone(adapted(name, key), [p], [s]))[0] for key, p, s in each]


def with_adapters(name: str, keys: str = "abcd", **options: Any) -> models.Engine:
    """Returns a small engine that has loaded these adapters."""
    options = {"few_programs": True, "max_adapters": len(keys), "max_adapter_rank": 3} | options
    engine = exactly(model(name), **options)
    for key in keys:
        engine.load_adapter(key, adapter(name, key))
    return engine


@pytest.mark.slow("compiles models with four adapters", quick=["llama-gqa"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "lfm2", "qwen35", "qwen2moe", "deepseek2"])
def test_tokens_are_those_of_models_with_the_adapters(name: str) -> None:
    keys = [NAMES[i % 5] for i in range(8)]
    prompts = prompts_of(model(name))
    samplings = samplings_of(len(prompts), max_new_tokens=8)
    want = wanted(name, keys, prompts, samplings)
    plain = wanted(name, [None] * 8, prompts, samplings)
    assert differing(want, plain) == [i for i in range(8) if keys[i] is not None]
    with with_adapters(name, pages=40, max_rows=3) as engine:
        for run in ("at once", "cached"):
            got = tokens_of(engine.generate(prompts, samplings, adapter=keys))
            assert not differing(got, want), run
        got = [
            engine.generate(p, s, adapter=k).tokens
            for p, s, k in zip(prompts, samplings, keys, strict=True)
        ]
        assert not differing(got, want), "one by one"
        engine.check()
        assert engine.stats().reused_tokens > 0


def test_bits_do_not_depend_on_other_requests() -> None:
    """Alone, mixed, with cached prefixes and preempted: tokens and log-probabilities are equal."""
    name, keys = "llama-gqa", [NAMES[i % 5] for i in range(8)]
    prompts = prompts_of(model(name))
    samplings = samplings_of(len(prompts), max_new_tokens=8, logprobs=0)
    options: Any = {"deterministic": True, "few_programs": False, "max_rows": 3}
    with with_adapters(name, pages=40, **options) as engine:
        each = list(zip(prompts, samplings, keys, strict=True))
        want = [bits_of(engine.generate(p, s, adapter=k)) for p, s, k in each]
        for run in ("mixed", "cached"):
            got = [bits_of(one) for one in engine.generate(prompts, samplings, adapter=keys)]
            assert not differing(got, want), run
        assert engine.stats().reused_tokens > 0
    with with_adapters(name, pages=6, **options) as engine:
        got = [bits_of(one) for one in engine.generate(prompts, samplings, adapter=keys)]
        assert not differing(got, want), "preempted"
        assert engine.stats().preemptions > 0


def test_constrained_requests() -> None:
    """Their rows run programs of their own."""
    given = model("llama-gqa")
    prompts = prompts_of(given, ((0, 20), (0, 9)))
    keys: list[str | None] = ["a", None]
    constraint = models.Constraint.regex("[a-z ]*")
    samplings = samplings_of(2, max_new_tokens=8, ignore_end=False, constraint=constraint)
    want = wanted("llama-gqa", keys, prompts, samplings)
    assert want != wanted("llama-gqa", [None, None], prompts, samplings)
    with with_adapters("llama-gqa", "a") as engine:
        assert tokens_of(engine.generate(prompts, samplings, adapter=keys)) == want


def test_a_model_that_has_adapters() -> None:
    name = "llama-gqa"
    (prompt,), (sampling,) = prompts_of(model(name), ((0, 20),)), samplings_of(1)
    base = adapted(name, "b")
    both = models.with_lora(base, files(name)["a"], scale=0.5)
    want = tokens_of(alone(both, [prompt], [sampling]))
    with exactly(base, few_programs=True, max_adapters=1) as engine:
        engine.load_adapter("a", adapter(name, "a"), scale=0.5)
        assert [engine.generate(prompt, sampling, adapter="a").tokens] == want
        assert [engine.generate(prompt, sampling).tokens] == tokens_of(
            alone(base, [prompt], [sampling])
        )


def test_loading_and_unloading_while_requests_run() -> None:
    """No program is compiled, a name is gone at once, and its place is free after its requests."""
    name = "llama-gqa"
    prompts, samplings = prompts_of(model(name), ((0, 20), (0, 12))), samplings_of(2)
    want = {key: wanted(name, [key, key], prompts, samplings) for key in ("a", "b", None)}
    options: Any = {"max_adapters": 1, "max_adapter_rank": 3, "warm_up": True}
    with exactly(model(name), few_programs=True, **options) as engine:
        with Gate(engine) as gate:
            plain = engine.submit(prompts[0], samplings[0])
            gate.step(2)
        engine.load_adapter("x", adapter(name, "a"))
        with Gate(engine) as gate:
            first = engine.submit(prompts[1], samplings[1], adapter="x")
            gate.step(3)
            engine.unload_adapter("x")
            assert engine.adapters == ()
            with pytest.raises(ValueError, match="adapter='x' is not loaded; loaded: none"):
                engine.submit(prompts[0], adapter="x")
        with pytest.raises(ValueError, match="running requests still use"):
            for _ in range(2000):
                engine.load_adapter("x", adapter(name, "b"))
                engine.unload_adapter("x")
        assert [first.result().tokens] == want["a"][1:]
        engine.load_adapter("x", adapter(name, "b"))
        assert tokens_of(engine.generate(prompts, samplings, adapter="x")) == want["b"]
        assert [plain.result().tokens] == want[None][:1]
        assert engine.stats().compilations == 0
        engine.check()
        wait_until(lambda: is_idle(engine))
