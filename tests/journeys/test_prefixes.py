"""Texts that are continued with a `Prefix`, between calls that share the program cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.implementations import needs_native

from jax_q4k import models

from .calls import Call
from .journey import Journey

pytestmark = needs_native

#: Models with sliding windows that keep only visible tokens, with recurrent states, and with pages
#: only.
NAMES = ("gemma3", "gpt-oss", "qwen35", "llama-gqa")


def two_turns(journey: Journey, call: Call) -> None:
    """Generates, then continues the text once."""
    prefix = models.Prefix()
    ((tokens, *_),) = journey.take(call, prefix)
    prompt = (*call.prompts[0], *tokens, 20, 21, 22, 23, 24)
    journey.take(dataclasses.replace(call, prompts=(prompt,)), prefix, streamed=True)


@pytest.mark.slow("compiles a program for each call of a journey")
@pytest.mark.parametrize("name", NAMES)
def test_a_text_goes_on_after_another_call(name: str, tmp_path: Path) -> None:
    """The call before has a KV cache of the same size, but without a prefix."""
    journey = Journey(tmp_path)
    call = Call(model=name, prompts=(tuple(range(30, 55)),), new_tokens=60)
    journey.take(call)
    journey.restart()
    two_turns(journey, call)


@pytest.mark.slow("compiles a program for each call of a journey")
def test_a_call_after_a_text_that_went_on(tmp_path: Path) -> None:
    journey, call = Journey(tmp_path), Call(prompts=(tuple(range(30, 55)),))
    two_turns(journey, call)
    for new in (20, 90):
        journey.restart()
        journey.take(dataclasses.replace(call, new_tokens=new))
    journey.restart()
    two_turns(journey, call)


@pytest.mark.slow("compiles a program for each call of a journey")
def test_texts_of_growing_and_other_sizes(tmp_path: Path) -> None:
    """Grows a cache, then continues a different text, then the first text again."""
    journey, prefix = Journey(tmp_path), models.Prefix()
    prompt = tuple(range(30, 45))
    for new in (10, 60, 20):
        call = Call(prompts=(prompt,), new_tokens=new)
        ((tokens, *_),) = journey.take(call, prefix)
        prompt = (*prompt, *tokens, 9)
    for other in ((*prompt[:20], 7, 8), prompt, prompt[:5]):
        journey.take(Call(prompts=(other,), new_tokens=10), prefix)


@pytest.mark.slow("compiles a program for each call of a journey")
def test_a_stream_that_is_left(tmp_path: Path) -> None:
    """Later calls reuse the cached programs and the prefix's KV cache."""
    journey, prefix, call = Journey(tmp_path), models.Prefix(), Call(new_tokens=100)
    pieces = call.pieces(journey.model(call), prefix)
    taken = [next(pieces).token for _ in range(27)]
    pieces.close()
    ((tokens, *_),) = journey.take(dataclasses.replace(call, new_tokens=27))
    assert list(tokens) == taken
    prompt = (*call.prompts[0], *taken, 40)
    journey.take(Call(prompts=(prompt,), new_tokens=100), prefix)
    journey.restart()
    journey.take(call)


@pytest.mark.slow("compiles a program for each call of a journey")
def test_conversations_beside_calls(tmp_path: Path) -> None:
    """Each answer equals that of a conversation with the same turns and no cached tokens."""
    sizes, calls = (12, 64), Call(model="demo", new_tokens=64)
    messages = ("How are you?", "And your sister?")
    sampling = {"temperature": 0.5, "seed": 3}
    journey = Journey(tmp_path)
    journey.take(calls)
    journey.restart()
    with calls.selected():
        talk = models.Conversation(journey.model(calls))
        for size, message in zip(sizes, messages, strict=True):
            anew = models.Conversation(calls.load(), turns=list(talk.turns))
            want = anew.answer(message, max_new_tokens=size, **sampling)
            got = talk.answer(message, max_new_tokens=size, **sampling)
            assert (got.tokens, got.text) == (want.tokens, want.text)
            assert talk.turns == anew.turns
    journey.take(calls)
