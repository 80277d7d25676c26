"""Every architecture through `Engine`: the tokens of `models.generate` of each prompt alone."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_q4k import models

from ..golden_files import FAMILIES, NAMES, VARIANTS, model, path
from .engine_runs import alone, differing, exactly, prompts_of, samplings_of, tokens_of

#: Pages of two rows that need eight at the end.
FEW_PAGES = 6


def check_equals(
    engine: models.Engine, prompts: list[Any], samplings: list[Any], want: list[list[int]]
) -> models.EngineStats:
    """Runs the prompts at once, then again with what is cached, then one by one."""
    runs = [tokens_of(engine.generate(prompts, samplings)) for _ in range(2)]
    pairs = zip(prompts[::-1], samplings[::-1], strict=True)
    runs.append([engine.generate(prompt, one).tokens for prompt, one in pairs][::-1])
    for name, got in zip(("at once", "cached", "one by one"), runs, strict=True):
        assert not differing(got, want), f"other tokens {name}"
    engine.check()
    stats = engine.stats()
    assert stats.running == stats.waiting == 0 and stats.free_pages == stats.pages
    assert stats.new_tokens == 3 * sum(map(len, want))
    return stats


@pytest.mark.slow("compiles five programs a model", quick=["gemma3"])
@pytest.mark.parametrize("name", [*NAMES, *VARIANTS, *FAMILIES])
def test_tokens_are_generates(name: str) -> None:
    """Covers shared beginnings, cached prefixes, and so few pages that rows are preempted."""
    loaded = model(name)
    prompts = prompts_of(loaded)
    samplings = samplings_of(len(prompts))
    want = tokens_of(alone(loaded, prompts, samplings))
    few = name != "llama-gqa"
    with exactly(loaded, few_programs=few, pages=FEW_PAGES) as engine:
        stats = check_equals(engine, prompts, samplings, want)
    assert stats.preemptions > 0 and stats.reused_tokens > 0


@pytest.mark.slow("compiles ten programs a model")
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "gpt-oss", "qwen35", "deepseek2"])
def test_texts_of_several_pieces_and_windows(name: str) -> None:
    """Covers prompts that take several prefill steps while others decode, and many pages."""
    loaded = model(name)
    parts = ((160, 120), (160, 130), (0, 20), (64, 30), (160, 120), (0, 270), (100, 180))
    prompts = prompts_of(loaded, parts)
    samplings = samplings_of(len(prompts))
    want = tokens_of(alone(loaded, prompts, samplings))
    with exactly(loaded, max_rows=5, max_context=320) as engine:
        stats = check_equals(engine, prompts, samplings, want)
    assert stats.preemptions == 0 and stats.pages == 100


@pytest.mark.slow("compiles ten programs a model")
@pytest.mark.parametrize("name", ["phi3-long", "phi3-short", "llama-longrope"])
def test_rope_factors_of_long_contexts(name: str) -> None:
    """Chooses the factors by the engine's context, where `generate` does by the text's length."""
    loaded = model(name)
    prompts = prompts_of(loaded, ((80, 40), (0, 130), (80, 50), (80, 40)))
    samplings = samplings_of(len(prompts), max_new_tokens=20)
    want = tokens_of(alone(loaded, prompts, samplings))
    with exactly(loaded, max_context=256, pages=16) as engine:
        check_equals(engine, prompts, samplings, want)


@pytest.mark.slow("compiles ten programs a dtype")
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_dtypes_of_pages(name: str, dtype: str) -> None:
    """Compares whole prompts, which `generate` prefills from pages in the engine's way too."""
    loaded, cache_dtype = model(name), jnp.dtype(dtype)
    prompts = prompts_of(loaded)
    samplings = samplings_of(len(prompts))
    with exactly(loaded, max_rows=1, cache_dtype=cache_dtype) as engine:
        one_by_one = [
            engine.generate(prompt, one, logprobs=0)
            for prompt, one in zip(prompts, samplings, strict=True)
        ]
    exact = alone(loaded, prompts[:1], samplings[:1], logprobs=0)[0].logprobs
    first = one_by_one[0].logprobs
    assert first is not None and exact is not None and first[0] != exact[0]
    assert first[0].logprob == pytest.approx(exact[0].logprob, abs=0.3)
    want = tokens_of(one_by_one)
    with exactly(loaded, few_programs=True, pages=FEW_PAGES, cache_dtype=cache_dtype) as engine:
        stats = check_equals(engine, prompts, samplings, want)
    assert stats.preemptions > 0 and stats.reused_tokens > 0


@pytest.mark.slow("compiles programs for several devices")
@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (2, 1)], ids=["1x2", "2x2", "2x1"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen35", "lfm2moe", "deepseek2-noyarn"])
def test_several_devices(name: str, shape: tuple[int, int]) -> None:
    """Covers shards of heads, and groups of rows with pages of their own."""
    loaded = model(name)
    prompts = prompts_of(loaded)
    samplings = samplings_of(len(prompts))
    want = tokens_of(alone(loaded, prompts, samplings))
    count = shape[0] * shape[1]
    mesh = jax.make_mesh(shape, ("data", "model"), devices=jax.devices()[:count])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names replicated tensors
        several = models.load(path(name), mesh=mesh)
    rows = 2 * shape[0]
    options: Any = {"few_programs": True, "max_rows": rows, "pages": FEW_PAGES * shape[0]}
    with exactly(several, **options) as engine:
        stats = check_equals(engine, prompts, samplings, want)
        assert stats.max_rows == rows and stats.pages == FEW_PAGES
    assert stats.preemptions > 0 and stats.reused_tokens > 0
