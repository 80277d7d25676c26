"""Parser of answers: events of golden answers, of any pieces of them, and of any text."""

from __future__ import annotations

import random
import re
import time

import pytest

from jax_q4k.models.chat.output import FAMILIES, NONE, Content, Reasoning, message_of
from jax_q4k.models.chat.output.json_text import JsonScanner

from .conversations import CASES, FORMS, TOOLS, Case, family, joined


def test_every_family_has_forms() -> None:
    assert {family(name).name for name in FORMS} == {one.name for one in FAMILIES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_golden_answers(case: Case) -> None:
    assert joined(case.events([case.text])) == case.parts


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_pieces_give_the_same_events(case: Case) -> None:
    rng = random.Random(str(case))
    assert joined(case.events(list(case.text))) == case.parts
    for _ in range(10):
        count = rng.randrange(1, 12)
        cuts = sorted(rng.randrange(len(case.text) + 1) for _ in range(count))
        ends = [*cuts, len(case.text)]
        pieces = [case.text[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
        assert joined(case.events(pieces)) == case.parts, pieces


@pytest.mark.parametrize("case", CASES, ids=str)
def test_arguments_are_always_a_prefix_of_json(case: Case) -> None:
    for end in range(len(case.text) + 1):
        for part in joined(case.events([case.text[:end]])):
            if part[0] == "call":
                scanner = JsonScanner()
                out, at = scanner.feed(part[2], 0, True)
                assert not scanner.failed and (out, at) == (part[2], len(part[2]))


@pytest.mark.parametrize("name", FORMS)
def test_text_is_held_back_no_longer_than_needed(name: str) -> None:
    parser = family(name).parser(TOOLS)
    if name == "HARMONY":
        parser.push("<|channel|>final<|message|>")
    assert parser.push("Hello ") == [Content("Hello")]
    assert parser.push("there") == [Content(" there")]
    opener = FORMS[name].opener
    assert parser.push(f" {opener[:1]}") in ([], [Content(f" {opener[:1]}")])
    (event,) = parser.push("? It")
    assert isinstance(event, Content) and event.text.endswith("? It")


@pytest.mark.parametrize("name", FORMS)
def test_arguments_stream(name: str) -> None:
    """A value's characters come with the piece that has them."""
    parser, form = family(name).parser(TOOLS), FORMS[name]
    parser.push(form.cut)
    (event,) = parser.push("ich und")
    assert event.text == "ich und"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [n for n in FORMS if FORMS[n].thought])
def test_thoughts_that_stay_in_the_content(name: str) -> None:
    form = FORMS[name]
    parser = family(name).parser(TOOLS, splits_reasoning=False)
    events = [*parser.push(form.thought + form.one), *parser.finish()]
    thought = form.thought.removesuffix("<|start|>assistant")
    call = ("call", "get_weather", form.arguments)
    assert joined(events) == [("content", thought.rstrip()), call]
    if name != "HARMONY":  # whose messages always have a header
        parser = family(name).parser(None, reasoning=False)
        assert joined([*parser.push(form.thought), *parser.finish()]) == [("content", form.thought)]


def test_a_thought_that_does_not_end() -> None:
    parser = family("HERMES").parser(TOOLS)
    assert parser.push("<think>\n\na ") == [Reasoning("a")]
    assert parser.push("b </th") == [Reasoning(" b")]
    assert parser.finish() == [Reasoning(" </th")]
    assert parser.push("more") == [] and parser.finish() == []


def test_ids_differ() -> None:
    text = FORMS["HERMES"].two
    ids = [
        e.id for _ in range(20) for e in family("HERMES").parser(TOOLS).push(text) if "id" in dir(e)
    ]
    assert len(set(ids)) == 40 and all(re.fullmatch("call_[0-9a-f]{24}", i) for i in ids)


def test_tools_of_other_forms() -> None:
    """Bare functions and Anthropic's tools count; others are ignored."""
    tools = [{"name": "now", "input_schema": {}}, {"type": "web_search"}, "x", {"function": 3}]
    parser = family("HERMES").parser(tools)
    events = parser.push('<tool_call>{"name": "now", "arguments": {}}</tool_call>')
    assert joined(events) == [("call", "now", "{}")]


FRAGMENTS = sorted(
    {
        fragment
        for form in FORMS.values()
        for text in (form.one, form.nested, form.thought)
        for fragment in re.findall(r"<[^>]*>|\[[A-Z/_]+\]|\w+|\W", text)
    }
    | {
        "get_weather",
        "now",
        "city",
        '{"name": "',
        '", "arguments": ',
        "\n",
        " ",
        "\\",
        "\\u12",
        "```",
    }
)


@pytest.mark.parametrize("name", [*FORMS, "NONE"])
def test_any_text_is_parsed_and_nothing_is_lost(name: str) -> None:
    """Words that no family drops come out of any mixture of the family's marks."""
    rng, form = random.Random(name), FORMS.get(name, FORMS["HERMES"])
    own = re.findall(r"<[^>]*>|\[[A-Z/_]+\]|\w+|\W", form.two + form.nested + form.thought)
    for trial in range(300):
        words, text = [], []
        for i in range(rng.randrange(1, 40)):
            text.append(rng.choice(FRAGMENTS if rng.random() < 0.2 else own))
            if rng.random() < 0.2:
                words.append(f"Qx{i}q")
                text.append(f"{rng.choice((' ', ''))}{words[-1]}")
        answer = "".join(text)
        if rng.random() < 0.5:
            answer = rng.choice((form.cut, form.thought, form.one[: rng.randrange(60)])) + answer
        one = family(name).parser(TOOLS, inside=rng.random() < 0.1)
        parts = joined([*one.push(answer), *one.finish()])
        out = " ".join(text for part in parts for text in part[1:])
        missing = [word for word in words if word not in out]
        assert not missing, (trial, answer, parts)


@pytest.mark.parametrize("name", [*FORMS, "NONE"])
def test_text_without_tools_is_unchanged(name: str) -> None:
    rng = random.Random(name)
    for _ in range(100):
        answer = "x" + "".join(rng.choices(FRAGMENTS, k=rng.randrange(40)))
        parser = family(name).parser(None, reasoning=False)
        parts = joined([*parser.push(answer), *parser.finish()])
        if name == "HARMONY" and "<|message|>" in answer:
            continue  # headers of messages are no text
        assert parts == [("content", answer)]


LONG = {
    "prose": "a b c " * 17_000,
    "spaces": " " * 100_000,
    "openers": "{opener}" * 9_000,
    "value": "{cut}" + "a\n\\n" * 25_000,
    "brackets": "{cut}" + '":[{{' * 25_000,
    "unnamed": '{opener}{{"arguments": {{"a": "' + "x{opener}{{" * 8_000,
    "thought": "{thought}" + "{begin}" * 9_000,
}


@pytest.mark.slow("parses long answers of every family", quick=["*HERMES*", "*QWEN_XML*", "*LFM2*"])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", LONG)
def test_time_grows_with_the_length_only(name: str, kind: str) -> None:
    form, one = FORMS[name], family(name)
    begin = one.thought.begin if one.thought else "<think>"
    text = LONG[kind].format(opener=form.opener, cut=form.cut, thought=form.thought, begin=begin)
    seconds = []
    for length in (50_000, 100_000):
        parser = one.parser(TOOLS)
        start = time.process_time()
        for character in text[:length]:
            parser.push(character)
        parser.finish()
        seconds.append(time.process_time() - start)
    assert seconds[1] < 1 or seconds[1] < 3 * seconds[0]
    start = time.process_time()
    parser = one.parser(TOOLS)
    parser.push(text[:100_000])
    parser.finish()
    assert time.process_time() - start < 1


def test_none_passes_everything_at_once() -> None:
    parser = NONE.parser(TOOLS)
    assert parser.push("<tool_call> ") == [Content("<tool_call>")]
    assert parser.finish() == [Content(" ")]


def test_a_message_is_the_sum_of_its_events() -> None:
    form = FORMS["HERMES"]
    text = f"{form.thought}Hello\n{form.two}\n."
    parser = family("HERMES").parser(TOOLS)
    message = message_of([*(e for c in text for e in parser.push(c)), *parser.finish()])
    assert (message.content, message.reasoning) == ("Hello.", "hm, {x}")
    assert [(call.name, call.arguments) for call in message.calls] == [
        ("get_weather", form.arguments),
        ("now", "{}"),
    ]
    assert len({call.id for call in message.calls}) == 2
