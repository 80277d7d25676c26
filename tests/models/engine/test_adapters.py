"""LoRA adapters of an engine: each request has its own, in one batch."""

from __future__ import annotations

import functools
import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_q4k import models
from jax_q4k.cache.program_cache import ProgramCache
from jax_q4k.models.engine.executor import Executor
from jax_q4k.models.runner.adapters import Pair
from jax_q4k.models.runner.engine_steps import DecodeRows

from ..adapters import random_pairs, write_gguf, write_peft
from ..golden_files import model as golden
from ..golden_files import path
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
def model(name: str) -> models.Model:
    return models.load("demo") if name == "demo" else golden(name)


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
        asked = models.Sampling(max_new_tokens=0, prompt_logprobs=0)
        for key in ("a", None):
            scores, values = (
                [entry and entry.logprob for entry in output.prompt_logprobs or ()]
                for output in (
                    engine.generate(prompts[0], asked, adapter=key),
                    *alone(adapted(name, key), prompts[:1], [asked]),
                )
            )
            assert scores[1:] == pytest.approx(values[1:], abs=1e-3)
        engine.check()
        assert engine.stats().reused_tokens > 0


@pytest.mark.slow("compiles programs with at least 16 rows")
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_bits_do_not_depend_on_other_requests(name: str) -> None:
    """Alone, mixed, with cached prefixes and preempted: tokens and log-probabilities are equal."""
    keys: list[Any] = ["a", "b", None, "a", "c", "d"]
    prompts = prompts_of(model(name), ((64, 20), (0, 70), (64, 50), (64, 9), (0, 9), (32, 33)))
    samplings = samplings_of(len(prompts), max_new_tokens=30, logprobs=3)
    options: Any = {"deterministic": True, "few_programs": False, "max_rows": 4}
    options["max_context"] = 192
    with with_adapters(name, **options) as engine:
        each = list(zip(prompts, samplings, keys, strict=True))
        want = [bits_of(engine.generate(p, s, adapter=k)) for p, s, k in each]
        before = engine.stats().reused_tokens
        for run in ("mixed", "cached"):
            got = [bits_of(one) for one in engine.generate(prompts, samplings, adapter=keys)]
            assert not differing(got, want), run
        assert engine.stats().reused_tokens > before > 0
    with with_adapters(name, pages=14, **options) as engine:
        got = [bits_of(one) for one in engine.generate(prompts, samplings, adapter=keys)]
        assert not differing(got, want), "preempted"
        assert engine.stats().preemptions > 0


@pytest.mark.slow("compiles the demo model three times")
def test_constrained_requests() -> None:
    """Their rows run programs of their own."""
    prompts, keys = ["The sea", "The moon"], ["a", None]
    constraint = models.Constraint.regex("[a-z ]*")
    samplings = samplings_of(2, max_new_tokens=8, ignore_end=False, constraint=constraint)
    want = wanted("demo", keys, prompts, samplings)
    assert want[0] != wanted("demo", [None], prompts[:1], samplings[:1])[0]
    with with_adapters("demo", "a") as engine:
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


@pytest.mark.slow("compiles the programs of an engine and of two models")
def test_loading_and_unloading_while_requests_run() -> None:
    """No program is compiled, a name is gone at once, and its place is free after its requests."""
    name = "llama-gqa"
    prompts, samplings = prompts_of(model(name), ((0, 20), (0, 12))), samplings_of(2)
    want = {key: wanted(name, [key, key], prompts, samplings) for key in ("a", "b", None)}
    options: Any = {"max_adapters": 1, "max_adapter_rank": 3, "warm_up": True}
    with exactly(model(name), few_programs=True, **options) as engine:
        gate = Gate(engine)
        with gate:
            plain = engine.submit(prompts[0], samplings[0])
            gate.step(2)
            assert not load_in(gate, engine, adapter(name, "a")) and not plain.is_done
            first = engine.submit(prompts[1], samplings[1], adapter="x")
            gate.step(3)
            engine.unload_adapter("x")
            assert engine.adapters == () and not first.is_done
            with pytest.raises(ValueError, match="adapter='x' is not loaded; loaded: none"):
                engine.submit(prompts[0], max_new_tokens=1, adapter="x")
            (error,) = load_in(gate, engine, adapter(name, "b"))
            assert "still use the adapters that were unloaded" in str(error)
        assert tokens_of([plain.result(), first.result()]) == [want[None][0], want["a"][1]]
        engine.load_adapter("x", adapter(name, "b"))
        assert tokens_of(engine.generate(prompts, samplings, adapter="x")) == want["b"]
        assert engine.stats().compilations == 0
        engine.check()
        wait_until(lambda: is_idle(engine))


def load_in(gate: Gate, engine: models.Engine, adapter: models.Adapter) -> list[Exception]:
    """Loads an adapter as "x" while requests run; returns the error, if there is one."""
    errors: list[Exception] = []

    def load() -> None:
        try:
            engine.load_adapter("x", adapter)
        except ValueError as error:
            errors.append(error)

    loader = threading.Thread(target=load)
    loader.start()
    wait_until(lambda: bool(engine._loop._calls))
    gate.step()
    loader.join()
    return errors


@pytest.fixture(scope="module")
def small() -> Iterator[models.Engine]:
    """An engine with two places, one of which is taken."""
    with with_adapters("llama-gqa", "a", max_adapters=2) as engine:
        yield engine


def test_a_name_that_comes_again_has_no_cached_pages(small: models.Engine) -> None:
    (prompt,) = prompts_of(model("llama-gqa"), ((0, 40),))
    want = {key: wanted("llama-gqa", [key], [prompt], samplings_of(1)) for key in ("b", "c")}
    before = small.stats().reused_tokens
    for key in ("b", "c"):
        small.load_adapter("x", adapter("llama-gqa", key))
        assert [small.generate(prompt, samplings_of(1), adapter="x").tokens] == want[key]
        assert small.stats().reused_tokens == before
        small.generate(prompt, samplings_of(1), adapter="x")
        assert small.stats().reused_tokens > before
        before = small.stats().reused_tokens
        small.unload_adapter("x")


def test_requests_that_are_cancelled_free_their_place(small: models.Engine) -> None:
    (prompt,) = prompts_of(model("llama-gqa"), ((0, 20),))
    for _ in range(3):
        small.load_adapter("x", adapter("llama-gqa", "b"))
        small.submit(prompt, samplings_of(1)[0], adapter="x").cancel()
        small.unload_adapter("x")


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "empty": ("", "b", {}, "name='' must be 1 to 64 letters"),
    "space": ("a b", "b", {}, "name='a b' must be"),
    "long": ("x" * 65, "b", {}, "must be 1 to 64 letters"),
    "line": ("x\n", "b", {}, "must be 1 to 64 letters"),
    "taken": ("a", "b", {}, "the adapter 'a' is loaded already; unload it first"),
    "scale": ("x", "b", {"scale": float("nan")}, "scale=nan must be a number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_are_refused(case: str, small: models.Engine) -> None:
    name, key, options, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        small.load_adapter(name, adapter("llama-gqa", key), **options)
    assert small.adapters == ("a",)


def test_adapters_that_do_not_fit(small: models.Engine, tmp_path: Path) -> None:
    given = model("llama-gqa")

    def read(pairs: Any) -> models.Adapter:
        return models.read_lora(write_gguf(tmp_path / "x.gguf", given, pairs), given.config)

    pairs = random_pairs(given, ("output",))
    assert "output.weight" in pairs
    message = "changes output.weight, which the engine does not adapt: load it with models.with_l"
    with pytest.raises(ValueError, match=message):
        small.load_adapter("x", read(pairs))
    wide = {n: (a.repeat(2, 0), b.repeat(2, 1)) for n, (a, b) in random_pairs(given).items()}
    with pytest.raises(ValueError, match="the adapter's rank is 6; max_adapter_rank is 3"):
        small.load_adapter("x", read(wide))
    pairs = {"blk.0.attn_q.weight": (np.ones((1, 4), "f4"), np.ones((8, 1), "f4"))}
    others = {n: Pair(a, b, 1.0, ("a", "b")) for n, (a, b) in pairs.items()}
    with pytest.raises(ValueError, match=r"attn_q.weight has shape \(8, 4\), not \("):
        small.load_adapter("x", models.Adapter(others, "x"))
    large = {n: (a, b * np.float32(1e7)) for n, (a, b) in random_pairs(given, ("attn_q",)).items()}
    with pytest.raises(ValueError, match="scale=1000000.0 makes the adapter of blk.* so"):
        small.load_adapter("x", read(large), scale=1e6)
    with pytest.raises(TypeError, match="adapter is of type str; it must be an Adapter"):
        small.load_adapter("x", "x.gguf")  # type: ignore[arg-type]
    small.load_adapter("b", adapter("llama-gqa", "b"))
    with pytest.raises(ValueError, match="max_adapters=2 adapters are loaded: a, b; unload one"):
        small.load_adapter("x", adapter("llama-gqa", "c"))
    with pytest.raises(ValueError, match="adapter='x' is not loaded; loaded: a, b"):
        small.generate([[5], [6]], max_new_tokens=1, adapter=["a", "x"])
    with pytest.raises(ValueError, match="adapter has 1 items for 2 prompts"):
        small.generate([[5], [6]], adapter=["a"])
    small.unload_adapter("b")
    with pytest.raises(ValueError, match="adapter='b' is not loaded; loaded: a"):
        small.unload_adapter("b")
    assert is_idle(small)


def test_steps_without_adapters_run_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given, places = model("llama-gqa"), list[int]()
    run = Executor.run

    def noted(self: Executor, program: Any, *arrays: Any) -> Any:
        if isinstance(program, DecodeRows):
            places.append(program.adapters)
        return run(self, program, *arrays)

    monkeypatch.setattr(Executor, "run", noted)
    with exactly(given, few_programs=True, max_adapters=2) as engine:
        engine.load_adapter("a", adapter("llama-gqa", "a"))
        for names, wanted in (([None, None], {0}), (["a", None], {0, 2}), (["a", "a"], {2})):
            places.clear()
            options: dict[str, Any] = {"max_new_tokens": 6, "ignore_end": True}
            engine.generate([[5, 6, 7], [8, 9]], adapter=names, **options)
            assert 0 < len({*places}) and {*places} <= wanted and (2 in places) == ("a" in names)


def test_engines_without_adapters() -> None:
    given = model("llama-gqa")
    with exactly(given) as engine:
        with pytest.raises(ValueError, match="no room for adapters: create it with max_adapters="):
            engine.load_adapter("a", adapter("llama-gqa", "a"))
        with pytest.raises(ValueError, match="adapter='a' is not loaded; loaded: none"):
            engine.submit([5], max_new_tokens=1, adapter="a")
        assert engine.adapters == ()
    with pytest.raises(ValueError, match="max_adapters=-1 must be 0 to 256"):
        exactly(given, max_adapters=-1)
    with pytest.raises(ValueError, match="max_adapter_rank=0 must be 1 to 1024"):
        exactly(given, max_adapters=1, max_adapter_rank=0)
    with pytest.raises(models.EngineClosedError):
        engine.load_adapter("a", adapter("llama-gqa", "a"))


def test_models_on_several_devices_are_refused() -> None:
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    loaded = models.load(path("llama-gqa"), mesh=mesh)
    with pytest.raises(ValueError, match="model is on several devices; max_adapters needs"):
        exactly(loaded, max_adapters=1)


def test_infinite_activations_of_an_adapter_reach_no_other_row() -> None:
    """An adapter that overflows would make the others' sums NaN, if factors of 0 multiplied it."""
    given = model("llama-gqa")
    huge = {
        name: Pair(np.sign(a) * np.float32(3e38), b * np.float32(1e-32), 1.0, ("a", "b"))
        for name, (a, b) in random_pairs(given, ("attn_q",)).items()
    }
    (prompt,) = prompts_of(given, ((0, 20),))
    with with_adapters("llama-gqa", "a", max_adapters=2) as engine:
        want = engine.generate(prompt, max_new_tokens=8, adapter="a").tokens
        engine.load_adapter("huge", models.Adapter(huge, "huge"))
        both = engine.generate([prompt] * 2, max_new_tokens=8, adapter=["huge", "a"])
        assert both[1].tokens == want


@pytest.mark.slow("compiles the programs of an engine")
def test_programs_are_cached_on_disk(tmp_path: Path) -> None:
    """A second engine loads them, and gives the same tokens; other sizes have other programs."""
    cache, keys = ProgramCache(tmp_path, 1 << 28), ["a", None]
    prompts = prompts_of(model("llama-gqa"), ((0, 20), (0, 9)))
    want = wanted("llama-gqa", keys, prompts, samplings_of(2))
    counts = []
    for places in (2, 2, 3, 0):
        loaded = models.load(path("llama-gqa"))
        loaded.program_cache = cache
        with exactly(loaded, few_programs=True, max_adapters=places) as engine:
            if places:
                engine.load_adapter("a", adapter("llama-gqa", "a"))
                assert tokens_of(engine.generate(prompts, samplings_of(2), adapter=keys)) == want
            else:
                assert engine.generate(prompts[1], samplings_of(2)[1]).tokens == want[1]
        counts.append(len(list(tmp_path.glob("*.program"))))
    assert 0 < counts[0] == counts[1] < counts[2] < counts[3]


def test_every_format_is_read(tmp_path: Path) -> None:
    given = model("qwen3-qknorm")
    pairs = random_pairs(given, ("attn_q",))
    for file in (
        write_gguf(tmp_path / "a.gguf", given, pairs),
        write_peft(tmp_path / "peft", given, pairs),
    ):
        read = models.read_lora(file, given.config)
        assert read.rank == 3 and read.pairs.keys() == pairs.keys()
        assert repr(read) == f"Adapter({str(file)!r}, {len(pairs)} matrices, rank 3)"
