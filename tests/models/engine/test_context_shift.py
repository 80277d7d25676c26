"""Texts longer than the context: each shift continues like a new prompt of the remaining tokens."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from jax_q4k import models
from jax_q4k.models.runner.speculative.drafts import PromptLookup

from ..golden_files import model, reference

pytestmark = [pytest.mark.cpu_kernels, pytest.mark.usefixtures("exact")]

CONTEXT = 40


def short(name: str) -> Any:
    """The model with a context of 40 tokens."""
    found = copy.copy(model(name))
    found.config = dataclasses.replace(found.config, context_length=CONTEXT)
    return found


def by_hand(name: str, prompt: list[int], count: int, keep: int) -> list[int]:
    """Generates greedy tokens, one context at a time."""
    text, new = list(prompt), []
    while len(new) < count:
        room = min(count - len(new), CONTEXT - len(text))
        part = models.generate(model(name), text, max_new_tokens=room, ignore_end=True).tokens
        new, text = new + part, text + part
        text = text[:keep] + text[keep + (len(text) - keep + 1) // 2 :]
    return new


@pytest.mark.slow("compiles programs of two lengths", quick=["llama-gqa-draft=None"])
@pytest.mark.parametrize("draft", [None, PromptLookup(tokens=3, shortest=1)])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen35"])
def test_texts_go_on(name: str, draft: Any) -> None:
    """Three prompts with different lengths and ends in a batch, and one alone."""
    loaded, ids = short(name), reference(name).prompt.tolist()
    prompts, counts = [ids[:30], ids[:7], ids[5:12]], (70, 90, 12)
    want = [by_hand(name, *row, 3) for row in zip(prompts, counts, strict=True)]
    samplings = [models.Sampling(max_new_tokens=count, ignore_end=True) for count in counts]
    given = {"shift": models.ContextShift(keep=3), "draft": draft}
    outs = models.generate(loaded, prompts, samplings, **given)
    assert [out.tokens for out in outs] == want
    *pieces, last = models.stream(loaded, prompts[0], samplings[0], **given)
    assert [piece.token for piece in pieces] == last.output.tokens == want[0]
    assert last.output.timings.new_tokens == 70
    assert last.output.timings.decoded_tokens == 69


@pytest.mark.slow("compiles programs of two lengths")
def test_draws_do_not_begin_anew() -> None:
    """The noise of a step is the same as without a shift."""
    loaded, flat = short("llama-gqa"), {"temperature": 100.0, "max_new_tokens": 120, "seed": 3}
    tokens = models.generate(loaded, [5], shift=models.ContextShift(), **flat).tokens
    assert len(tokens) == 120
    first = models.generate(model("llama-gqa"), [5], **flat).tokens
    assert tokens[:39] == first[:39]
    assert sum(a == b for a, b in zip(tokens, first, strict=True)) > 80  # draws are nearly uniform


@pytest.mark.slow("compiles several programs")
def test_stop_strings_and_logprobs_over_a_shift() -> None:
    loaded, options = short("text-spm"), {"max_new_tokens": 80, "shift": models.ContextShift()}
    whole = models.generate(loaded, [1, 300, 400], ignore_end=True, logprobs=1, **options)
    assert len(whole.tokens) == len(whole.logprobs) == 80
    middle = len(models.generate(loaded, [1, 300, 400], ignore_end=True, max_new_tokens=37).text)
    stop = whole.text[middle - 3 : middle + 30]
    assert whole.text.find(stop) == middle - 3
    found = models.generate(loaded, [1, 300, 400], ignore_end=True, stop=stop, **options)
    assert found.finish_reason == "stop" and found.text == whole.text[: middle - 3]


def test_prompts_that_do_not_fit() -> None:
    loaded = short("llama-gqa")
    with pytest.raises(ValueError, match="exceed the context length, 40"):
        models.generate(loaded, [1, 2], max_new_tokens=39)
    with pytest.raises(ValueError, match="a prompt of 40 tokens with keep=1 leaves no"):
        models.generate(loaded, [1] * 40, shift=models.ContextShift())
    with pytest.raises(ValueError, match="a prompt of 2 tokens with keep=21 leaves no"):
        models.stream(loaded, [1, 2], shift=models.ContextShift(keep=21))
    with pytest.raises(ValueError, match="keep=-1 must be at least 0"):
        models.ContextShift(keep=-1)
    assert models.ContextShift(keep=0).rest([1, 2, 3]) == [3]
    assert models.ContextShift(keep=1).rest([1, 2, 3, 4, 5]) == [1, 4, 5]
