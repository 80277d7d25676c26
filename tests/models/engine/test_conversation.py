"""Conversations: prompts that fit the context, and answers in the template's format."""

from __future__ import annotations

import functools
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import chat, tokenizer
from jax_q4k.models.engine.conversation import Conversation, TooLongError


@functools.cache
def load(name: str) -> tokenizer.Tokenizer:
    return tokenizer.from_gguf(GOLDEN.parent / "tokenizers" / f"ggml-vocab-{name}.gguf")


def conversation(context: int, name: str = "qwen2", **fields: Any) -> Conversation:
    config = types.SimpleNamespace(context_length=context)
    model: Any = types.SimpleNamespace(config=config, tokenizer=load(name))
    return Conversation(model, **fields)


def turns(count: int) -> list[dict[str, str]]:
    """Alternating turns, starting with the user."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": f"message number {i}"} for i in range(count)]


def test_a_prompt_is_the_templates() -> None:
    c = conversation(1000, system="S", turns=turns(3))
    prompt = c.prompt(10)
    messages = [{"role": "system", "content": "S"}, *turns(3)]
    assert c.messages == messages and prompt.tokens == chat.encode(load("qwen2"), messages)
    assert (prompt.max_new_tokens, prompt.dropped) == (10, 0)


@pytest.mark.parametrize("asked", [10, 1000])
def test_the_oldest_turns_go_where_the_context_is_full(asked: int) -> None:
    """The system message stays; the answer gets the requested room, or half of the context."""
    c = conversation(100, system="S", turns=turns(21))
    prompt = c.prompt(asked)
    room = min(asked, 50)
    assert prompt.dropped > 0 and prompt.dropped % 2 == 0
    assert c.turns == turns(21)[prompt.dropped :]
    assert len(prompt.tokens) + room <= 100
    assert prompt.max_new_tokens == min(asked, 100 - len(prompt.tokens))
    longer = [{"role": "system", "content": "S"}, *turns(21)[prompt.dropped - 2 :]]
    assert len(chat.encode(load("qwen2"), longer)) + room > 100
    assert prompt.tokens == chat.encode(load("qwen2"), c.messages)


def test_a_message_that_fits_alone_and_one_that_does_not() -> None:
    last = {"role": "user", "content": "1" * 31}
    size = len(chat.encode(load("qwen2"), [last]))
    c = conversation(size + 5, turns=[*turns(2), last])
    prompt = c.prompt(1000)
    assert prompt.dropped == 2 and prompt.max_new_tokens == 5
    c = conversation(size, turns=[*turns(2), last])
    problem = f"the message makes a prompt of {size} tokens; the context length is {size}"
    with pytest.raises(TooLongError, match=problem):
        c.prompt(10)
    assert c.turns == [*turns(2), last]


def test_a_transcript_where_there_is_no_template() -> None:
    c = conversation(100, "llama-spm", system="S", turns=turns(3))
    t = load("llama-spm")
    assert not c.has_template and conversation(9).has_template
    want = "System: S\nUser: message number 0\nAssistant: message number 1\n"
    want += "User: message number 2\nAssistant:"
    assert t.decode(c.prompt(10).tokens) == want
    assert c.prompt(10).tokens == t.encode(want)
    c.turns[-1]["content"] = "</s>"  # from a user, so it is text
    assert t.eos_token_id not in c.prompt(10).tokens


ANALYSIS = "<|channel|>analysis<|message|>"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Hello", {"content": "Hello"}),
        ("<think>a</think>Hello", {"content": "<think>a</think>Hello"}),
        (
            f"{ANALYSIS}Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello",
            {"content": "Hello", "thinking": "Hm."},
        ),
        ("<|channel|>final<|message|>Hello", {"content": "Hello"}),
        (f"{ANALYSIS}Hm", {"content": "", "thinking": "Hm"}),
    ],
)
def test_answers_as_templates_take_them(text: str, answer: dict[str, str]) -> None:
    """gpt-oss's template refuses an answer that spells out its channels."""
    c = conversation(100)
    c.add_answer(text)
    assert c.turns == [{"role": "assistant", **answer}]


def test_answers_come_one_at_a_time() -> None:
    """A second stream would lack the first one's answer, or mix up the turns."""
    talk = Conversation(models.load("demo"))
    options = {"max_new_tokens": 4}
    first, second = talk.stream("Hello.", **options), talk.stream("Good night.", **options)
    next(first)
    for ask in (lambda: talk.stream("And you?", **options), lambda: next(second)):
        with pytest.raises(RuntimeError, match="another answer of the conversation is in progress"):
            ask()
    list(first)
    third = talk.stream("And you?", **options)
    assert [turn["role"] for turn in talk.turns] == ["user", "assistant"]
    list(talk.stream("Who?", **options))
    with pytest.raises(RuntimeError, match="has changed since"):
        next(third)
    assert [turn["content"] for turn in talk.turns[::2]] == ["Hello.", "Who?"]


def test_threads_that_ask_at_once_get_an_answer_or_an_error() -> None:
    talk = Conversation(models.load("demo"))

    def ask(i: int) -> bool:
        try:
            return bool(talk.answer(f"Question {i}", max_new_tokens=4).tokens)
        except RuntimeError:
            return False

    with ThreadPoolExecutor(4) as pool:
        answered = sum(pool.map(ask, range(8)))
    assert answered >= 1
    assert [turn["role"] for turn in talk.turns] == ["user", "assistant"] * answered


def test_a_transcript_has_no_end_token() -> None:
    """Files of embedding models request an end token."""
    path = GOLDEN.parent / "tokenizers" / "ggml-vocab-llama-spm.gguf"
    metadata = jq.gguf.read_header(path).metadata | {"tokenizer.ggml.add_eos_token": True}
    c = conversation(1000, "llama-spm", turns=turns(1))
    want = c.prompt(10).tokens
    c.model.tokenizer = tokenizer.from_metadata(metadata)
    assert c.model.tokenizer.encode("a")[-1] == 2 and c.prompt(10).tokens == want
