"""Conversations: prompts that fit the context, and answers in the template's format."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import chat, tokenizer
from jax_q4k.models.chat.output import detection
from jax_q4k.models.chat.output.answer import Tags
from jax_q4k.models.engine import generate
from jax_q4k.models.engine.conversation import Conversation, TooLongError
from jax_q4k.models.engine.outputs import Output, Piece, Timings
from jax_q4k.models.sampling import Constraint, Sampling, Thought


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


#: Renders a thought, and begins one if `inside` is set.
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if inside %}<think>\n{% endif %}{% endif %}"
)
#: In the form of gpt-oss' template, which refuses an answer that spells out its channels.
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if '<|channel|>' in m.content %}"
    "{{ raise_exception('channels') }}{% endif %}{% if m.thinking %}<|start|>assistant<|channel|>"
    "analysis<|message|>{{ m.thinking }}<|end|>{% endif %}{% for c in m.tool_calls %}<|start|>"
    "assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>{% endfor %}<|start|>assistant<|channel|>final"
    "<|message|>{{ m.content }}<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
CHANNELS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"


def thinker(
    monkeypatch: pytest.MonkeyPatch, text: str, template: str
) -> tuple[Conversation, list[Sampling]]:
    """Returns a conversation with a model that answers with a text, a character in each piece.

    Also returns a list that gets the sampling parameters of each answer.
    """

    def stream(model: Any, prompt: Any, sampling: Sampling, **_: Any) -> Iterator[Piece]:
        seen.append(sampling)
        for i, character in enumerate(text):
            yield Piece(i, character)
        yield Piece(None, "", Output([*range(len(text))], text, "end", Timings()))

    seen: list[Sampling] = []
    monkeypatch.setattr(generate, "stream", stream)
    talk = conversation(1000)
    talk.model.tokenizer = load("qwen2").with_chat_template(template)
    return talk, seen


@pytest.mark.parametrize(
    ("template", "text", "answer", "thought"),
    [
        (THINKING, "Hello", "Hello", ""),
        (THINKING, "<think>\nHm.\n</think>\n\nHello", "Hello", "Hm."),
        (THINKING, "<think>\nHm", "", "Hm"),
        (HARMONY, f"{CHANNELS}Hello", "Hello", "Hm."),
        (HARMONY, "<|channel|>final<|message|>Hello", "Hello", ""),
        (HARMONY, "<|channel|>analysis<|message|>Hm", "", "Hm"),
        ("{{ messages[-1].content }}", "<think>a</think> b", "<think>a</think> b", ""),
    ],
)
def test_thoughts_are_apart(
    monkeypatch: pytest.MonkeyPatch, template: str, text: str, answer: str, thought: str
) -> None:
    talk, _ = thinker(monkeypatch, text, template)
    *pieces, last = talk.stream("Hi")
    assert "".join(piece.text for piece in (*pieces, last)) == answer
    assert "".join(piece.reasoning for piece in (*pieces, last)) == thought
    assert last.output is not None and len(last.output.tokens) == len(text)
    assert (last.output.text, last.output.reasoning) == (answer, thought)
    thoughts = {"reasoning_content": thought} if thought else {}
    assert talk.turns[1:] == [{"role": "assistant", "content": answer, **thoughts}]
    # The template takes what it gets.
    talk.turns.append({"role": "user", "content": "More"})
    prompt = load("qwen2").decode(talk.prompt(10).tokens, skip_special=False)
    assert thought in prompt and prompt.count("Hm") == bool(thought)


def test_a_prompt_that_begins_a_thought(monkeypatch: pytest.MonkeyPatch) -> None:
    talk, _ = thinker(monkeypatch, "Hm.\n</think>\n\nHello", THINKING)
    talk.variables["inside"] = True
    out = talk.answer("Hi")
    assert (out.reasoning, out.text) == ("Hm.", "Hello")


def test_a_thought_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that the parser holds back, as it might begin a mark, is part of it."""
    talk, _ = thinker(monkeypatch, "<think>\nHm, 1 </think>Hello", THINKING)
    pieces = talk.stream("Hi")
    assert "".join(next(pieces).reasoning for _ in range(len("<think>\nHm, 1 </th"))) == "Hm, 1"
    pieces.close()  # type: ignore[attr-defined]
    assert talk.turns[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm, 1 </th",
    }


def test_sampling_of_a_model_that_thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A form applies behind the thought; texts have the control tokens of its marks."""
    talk, seen = thinker(monkeypatch, "<think>a</think>b", THINKING)
    talk.answer("Hi", Sampling(constraint=Constraint.choice(["b"]), spelled_tokens="<|im_end|>"))
    talk.variables["inside"] = True
    talk.answer("Hi", Sampling(constraint=Constraint.choice(["b"])))
    thoughts = [one.constraint.thought for one in seen]
    assert thoughts == [Thought("</think>", "<think>"), Thought("</think>")]
    assert seen[0].spelled_tokens == ("<|im_end|>",)
    framed = THINKING.replace("<think>", "<|im_start|>").replace("</think>", "<|im_end|>")
    monkeypatch.setattr(detection, "THOUGHTS", (Tags("<|im_start|>", "<|im_end|>"),))
    talk, seen = thinker(monkeypatch, "<|im_start|>a<|im_end|>b", framed)
    assert talk.answer("Hi").reasoning == "a"
    assert seen[0].spelled_tokens == ("<|im_end|>", "<|im_start|>")


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
