"""Prompts and engines for tests of `models.Engine`, and tokens of each prompt alone."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.engine import sizing
from jax_q4k.models.engine.stages import standard_stages
from jax_q4k.models.sampling.stages import SamplingStages

#: (tokens of a common beginning, own tokens) of prompts that end in the same bucket of lengths.
PARTS = ((32, 8), (0, 30), (20, 12), (32, 7), (0, 26), (16, 20), (32, 8), (0, 5))


def prompts_of(
    model: models.Model, parts: Sequence[tuple[int, int]] = PARTS, seed: int = 0
) -> list[list[int]]:
    """Returns a prompt for each of `parts`; equal parts give equal prompts."""
    random = np.random.default_rng(seed)
    vocab = model.config.vocab_size
    base = random.integers(3, vocab, max(shared for shared, _ in parts)).tolist()
    own = {part: random.integers(3, vocab, part[1]).tolist() for part in dict.fromkeys(parts)}
    return [base[: part[0]] + own[part] for part in parts]


def samplings_of(count: int, **fields: Any) -> list[models.Sampling]:
    """Returns greedy sampling and temperatures in turn, each with a seed of its own."""
    options = {"max_new_tokens": 24, "ignore_end": True} | fields
    return [
        models.Sampling(temperature=0.9 * (i % 2), seed=100 + i, **options) for i in range(count)
    ]


def exactly(
    model: models.Model, *, few_programs: bool = False, usual_stages: bool = False, **options: Any
) -> models.Engine:
    """Returns a small engine with float32 activations.

    few_programs: compiles three programs, without penalties, instead of about ten. usual_stages:
    compiles these few with penalties, too.
    """
    small = {"max_rows": 2, "max_context": 64, "warm_up": False}
    with contextlib.ExitStack() as stack:
        stack.enter_context(jq.implementation(activations="f32"))
        if few_programs:
            of_engine = sys.modules[models.Engine.__module__]
            stages = SamplingStages(draws=True)
            if usual_stages:
                stages = standard_stages((0,))
            for module, name, value in (
                (sizing, "CPU_SHAPES", ((1, 16), (2, 32))),
                (of_engine, "row_buckets", lambda slots, *_: (slots,)),
                (of_engine, "standard_stages", lambda _: stages),
            ):
                stack.enter_context(mock.patch.object(module, name, value))
        return models.Engine(model, **(small | options))


def alone(
    model: models.Model,
    prompts: Sequence[Any],
    samplings: Sequence[models.Sampling],
    **options: Any,
) -> list[models.Output]:
    """Returns what `models.generate` gives for each prompt alone, with float32 activations."""
    with jq.implementation(activations="f32"):
        pairs = zip(prompts, samplings, strict=True)
        return [models.generate(model, prompt, one, **options) for prompt, one in pairs]


def tokens_of(outputs: Sequence[models.Output]) -> list[list[int]]:
    return [output.tokens for output in outputs]


def differing(got: Sequence[Any], want: Sequence[Any]) -> list[int]:
    """Returns which entries differ."""
    return [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]


def bits_of(output: models.Output) -> Any:
    """Returns tokens, finish reason and log-probabilities of an output."""
    return dataclasses.replace(output, timings=models.Timings())


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits until the condition holds; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come to hold"
        time.sleep(0.002)


def is_idle(engine: models.Engine) -> bool:
    """Returns whether no request is left and all pages are free."""
    stats = engine.stats()
    return not stats.running and not stats.waiting and stats.free_pages == stats.pages


class Gate:
    """Context in which an engine runs only the steps that the test lets through, of a token each.

    Attributes:
      steps: number of steps that were started.
    """

    def __init__(self, engine: models.Engine) -> None:
        self.steps = 0
        self._loop, self._stepper = engine._loop, engine._loop.stepper
        self._dispatch = self._stepper.dispatch
        self._allowed, self._is_held = threading.Semaphore(0), threading.Event()
        self._is_open = False

    def __enter__(self) -> Gate:
        self._stepper.dispatch = self._wait_and_dispatch  # type: ignore[method-assign]
        self._loop._steps = lambda: 1  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._loop._steps
        self._is_open = True
        self._allowed.release()
        self._stepper.dispatch = self._dispatch  # type: ignore[method-assign]

    def step(self, count: int = 1) -> None:
        """Lets `count` steps start. The next one, if any, is planned then and waits."""
        for _ in range(count):
            wait_until(self._is_held.is_set)
            before = self.steps
            self._allowed.release()
            wait_until(lambda before=before: self.steps > before)  # type: ignore[misc]
            wait_until(lambda: self._is_held.is_set() or not self._loop.has_work)

    def _wait_and_dispatch(self, plan: Any) -> Any:
        if not self._is_open:
            self._is_held.set()
            self._allowed.acquire()
            self._is_held.clear()
        ticket = self._dispatch(plan)
        self.steps += 1
        return ticket
