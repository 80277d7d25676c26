"""Random requests, cancelled and not, on too few pages: no page, token or request is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import jax_q4k as jq
from jax_q4k import models

from ..golden_files import model
from .engine_runs import exactly, is_idle, wait_until

#: Longest text; a row needs six pages for it.
CONTEXT = 96


@dataclasses.dataclass
class Report:
    """Counts of a storm.

    Attributes:
      wrong: requests whose tokens differ from those of the prompt alone.
      cancelled: requests that were cancelled before their end.
      drafted: draft tokens of all requests.
      stats: of the engine, at the end.
    """

    wrong: list[str] = dataclasses.field(default_factory=list)
    cancelled: int = 0
    drafted: int = 0
    seconds: float = 0.0
    stats: models.EngineStats | None = None


def requests_of(loaded: models.Model, size: int, seed: int) -> list[tuple[list[int], Any]]:
    """Returns `size` random prompts, many with a common beginning, and their sampling."""
    draw = random.Random(seed)
    vocab = loaded.config.vocab_size
    bases = [[draw.randrange(3, vocab) for _ in range(60)] for _ in range(4)]
    found = []
    for i in range(size):
        shared = draw.choice([0, 0, 16, 16, 20, 32])
        own = [draw.randrange(3, vocab) for _ in range(draw.randint(1, 20))]
        prompt = draw.choice(bases)[:shared] + own
        count = min(draw.choice([1, 5, 30, 60, 75]), CONTEXT - len(prompt))
        fields: dict[str, Any] = {"max_new_tokens": count, "seed": i}
        if draw.random() < 0.5:
            fields["temperature"] = draw.choice([0.7, 1.0, 1.5])
        if draw.random() < 0.2:
            fields |= {"top_k": 20, "repetition_penalty": 1.2}
        if draw.random() < 0.2:
            fields |= {"logit_bias": {draw.randrange(vocab): 3.0}}
        if loaded.tokenizer is not None:
            end = loaded.tokenizer.eos_token_ids[0]
            if draw.random() < 0.3:
                fields |= {"stop": draw.choice(["e", " the", "ing", ","])}
            elif draw.random() < 0.3:
                fields |= {"logit_bias": {end: 8.0}}
            else:
                fields |= {"ignore_end": True}
        found.append((prompt, models.Sampling(**fields)))
    return found


def storm(
    name: str, size: int, *, deterministic: bool = False, draft: Any = None, seed: int = 0
) -> Report:
    """Runs `size` requests from many threads and compares their tokens with those of each alone.

    Cancels 30 %. There are pages for a part of what all rows need for full contexts. Activations
    are float32, or in deterministic mode int8. Of the requests, 30 % do without the drafts of an
    engine that has some, and steps of more than three rows do, too.
    """
    rows, pages = (16, 12) if deterministic else (6, 11)
    loaded, report = model(name), Report()
    requests = requests_of(loaded, size, seed)
    lock, began = threading.Lock(), time.monotonic()
    outputs: dict[int, models.Output] = {}
    options: dict[str, Any] = {"max_context": CONTEXT, "deterministic": deterministic}
    make = functools.partial(models.Engine, warm_up=False) if deterministic else exactly
    with make(loaded, max_rows=rows, pages=pages, draft=draft, **options) as engine:
        engine._loop.stepper.draft_costs = {3: 0.01, rows: math.inf}

        def run(i: int) -> None:
            draw = random.Random(seed + 1000 + i)
            prompt, sampling = requests[i]
            time.sleep(draw.random() * 0.01)
            request = engine.submit(prompt, sampling, drafts=draw.random() < 0.7)
            if draw.random() < 0.3:
                after = draw.choice([0, 0, 1, 3, 8])
                if after:
                    for count, _ in enumerate(request, 1):
                        if count == after:
                            break
                else:
                    time.sleep(draw.random() * 0.02)
                with lock:
                    report.cancelled += request.cancel()
            outputs[i] = request.result(120)
            if draw.random() < 0.1:
                assert [p.token for p in request][:-1] == outputs[i].tokens

        # More threads than rows, so that requests wait and are cancelled while they do.
        with ThreadPoolExecutor(4 * rows) as pool:
            for done in [pool.submit(run, i) for i in range(size)]:
                done.result(300)
        wait_until(lambda: is_idle(engine))
        engine.check()
        report.stats = engine.stats()
    report.drafted = sum(output.timings.drafted_tokens for output in outputs.values())
    report.seconds = time.monotonic() - began
    with contextlib.ExitStack() as stack:
        if deterministic:
            of_one = stack.enter_context(make(loaded, max_rows=1, **options)).generate
        else:
            stack.enter_context(jq.implementation(activations="f32"))
            of_one = functools.partial(models.generate, loaded)
        for i, (prompt, sampling) in enumerate(requests):
            want, got = of_one(prompt, sampling), outputs[i]
            is_whole = got.finish_reason != "cancelled"
            equal = got.tokens == want.tokens[: None if is_whole else len(got.tokens)]
            if is_whole:
                equal &= (got.text, got.finish_reason) == (want.text, want.finish_reason)
            if not equal:
                report.wrong.append(f"{i}: {got.tokens} for {want.tokens}")
    return report


def check(report: Report, size: int, preemptions: int) -> None:
    stats = report.stats
    assert stats is not None and not report.wrong, report.wrong[:5]
    assert stats.running == stats.waiting == 0 and stats.free_pages == stats.pages
    assert stats.preemptions >= preemptions and 0.1 * size <= report.cancelled <= 0.4 * size


@pytest.mark.slow("runs hundreds of requests twice")
@pytest.mark.parametrize("name", ["llama-gqa", "text-spm", "gemma3", "qwen35"])
def test_storm(name: str, record_property: Callable[[str, object], None]) -> None:
    """Runs 300 requests, or as many as the environment variable STORM_REQUESTS says."""
    size = int(os.environ.get("STORM_REQUESTS", 300 if name == "llama-gqa" else 120))
    report = storm(name, size)
    record_property("figure", _described(name, size, report))
    check(report, size, size // 10)
    assert report.stats is not None and report.stats.reused_tokens > 0


@pytest.mark.slow("runs hundreds of requests twice")
@pytest.mark.parametrize("name", ["text-spm", "qwen35"])
def test_storm_with_drafts(name: str, record_property: Callable[[str, object], None]) -> None:
    """Runs 60 or 120 requests, or as many as the environment variable STORM_REQUESTS says."""
    size = int(os.environ.get("STORM_REQUESTS", 120 if name == "text-spm" else 60))
    report = storm(name, size, draft=models.drafts.PromptLookup(tokens=3, shortest=1))
    record_property("figure", f"with drafts: {_described(name, size, report)}")
    check(report, size, size // 20)
    assert report.drafted > 100


@pytest.mark.slow("runs hundreds of requests twice")
@pytest.mark.parametrize("name", ["text-spm", "qwen35moe"])
def test_storm_on_a_deterministic_engine(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    """Runs 60 requests, or as many as the environment variable STORM_REQUESTS says."""
    size = int(os.environ.get("STORM_REQUESTS", 60))
    report = storm(name, size, deterministic=True)
    record_property("figure", f"deterministic {_described(name, size, report)}")
    check(report, size, size // 20)


def _described(name: str, size: int, report: Report) -> str:
    assert report.stats is not None
    return (
        f"storm of {name}: {size} requests in {report.seconds:.0f} s, {report.cancelled} cancelled,"
        f" {report.stats.preemptions} preemptions, {report.stats.reused_tokens} tokens reused"
    )
