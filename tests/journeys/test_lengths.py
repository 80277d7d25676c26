"""Calls that differ only in a number or a dtype, each with a reloaded model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.implementations import needs_native

from .calls import Call
from .journey import Journey

pytestmark = needs_native

BATCH = ((1, 5, 9), (4,), (8, 2, 6, 3, 5, 30, 31))
CALLS = {
    "one prompt": Call(),
    "a batch": Call(prompts=BATCH, sampling="drawn"),
    "int8 pages, int8 activations": Call(cache_dtype="int8", activations="q8_1"),
    "an adapter": Call(lora=("adapter", 1.0), sampling="logprobs"),
}


@pytest.mark.slow("compiles a program for each call of a journey", quick=["one prompt"])
@pytest.mark.parametrize("what", CALLS)
def test_lengths(what: str, tmp_path: Path) -> None:
    """KV caches of 64, 128 and 64 tokens."""
    journey = Journey(tmp_path)
    for count in (20, 90, 20):
        journey.take(dataclasses.replace(CALLS[what], new_tokens=count))
        journey.restart()


@pytest.mark.slow("compiles a program for each call of a journey")
def test_lengths_that_shrink(tmp_path: Path) -> None:
    journey = Journey(tmp_path)
    for count in (200, 90, 20):
        journey.take(Call(new_tokens=count))
        journey.restart()


@pytest.mark.slow("compiles a program for each call of a journey")
def test_a_context_that_shifts(tmp_path: Path) -> None:
    """Calls with and without a context shift, with prompts of different lengths."""
    journey, call = Journey(tmp_path), Call(model="short", prompts=((1, 5, 9), (4, 6)))
    for new in (30, 150, 60):
        journey.take(dataclasses.replace(call, new_tokens=new))
        journey.restart()


def test_a_prompt_longer_than_the_call_before(tmp_path: Path) -> None:
    """Prompts with the same padded length whose KV caches differ in size."""
    journey = Journey(tmp_path)
    for length, new in ((34, 20), (60, 60)):
        prompt = tuple(range(3, 3 + length))
        journey.take(Call(prompts=(prompt,), new_tokens=new), streamed=True)
        journey.restart()


@pytest.mark.slow("compiles a program for each call of a journey")
def test_page_dtypes(tmp_path: Path) -> None:
    journey = Journey(tmp_path)
    for dtype in ("bfloat16", "float32", "float16", "bfloat16"):
        journey.take(Call(cache_dtype=dtype))
        journey.restart()


@pytest.mark.slow("compiles a program for each call of a journey")
def test_activations_and_kernels(tmp_path: Path) -> None:
    journey, call = Journey(tmp_path), Call(model="llama-bias")
    for name, activations in (("native", "q8_1"), ("native", "f32"), ("xla", None)):
        given = {"implementation": name, "activations": activations}
        journey.take(dataclasses.replace(call, **given))
        journey.restart()
