"""Structured output over HTTP: all names of it, by official clients and by hand."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from jax_q4k.models.sampling import ConstraintError
from jax_q4k.models.sampling.grammars import Matcher

from .running import Running

ENOUGH = 300  # tokens: an answer of these schemas ends before, however much white space it has
MESSAGES: Any = [{"role": "user", "content": "Name a colour."}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "dark": {"type": "boolean"}},
    "required": ["colour", "dark"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "red" | "blue"'
NAMED = {"name": "answer", "schema": SCHEMA, "strict": True}


class Colour(pydantic.BaseModel):
    """An answer."""

    model_config = pydantic.ConfigDict(extra="forbid")

    colour: str = pydantic.Field(max_length=8)
    count: int = pydantic.Field(ge=0, le=99)


def post(server: Running, path: str, **body: Any) -> Any:
    return server.client.post(path, json={"max_tokens": ENOUGH, **body})


def is_object(text: str) -> bool:
    found = json.loads(text)
    return found.keys() == SCHEMA["properties"].keys() and type(found["dark"]) is bool  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, None),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, None),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, None),
        ({"structured_outputs": {"json": SCHEMA}}, None),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, None),
        ({"json_schema": SCHEMA}, None),
        ({"guided_json": SCHEMA}, None),
        ({"structured_outputs": {"regex": "[0-9]{2}"}}, "[0-9]{2}"),
        ({"guided_regex": "[0-9]{2}"}, "[0-9]{2}"),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
        ({"guided_choice": ["red", "blue"]}, "red|blue"),
        ({"structured_outputs": {"grammar": 'start: "red" | "blue"'}}, "red|blue"),
        ({"grammar": GRAMMAR}, "red|blue"),
        ({"guided_grammar": GRAMMAR}, "red|blue"),
    ],
)
def test_names(server: Running, fields: dict[str, Any], pattern: str | None) -> None:
    found = post(server, "/v1/completions", prompt="A", **fields).json()
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "stop"
    text = choice["text"]
    assert is_object(text) if pattern is None else re.fullmatch(pattern, text)


def test_streams_and_several_answers(server: Running) -> None:
    """The pieces joined are the text of the same request without a stream."""
    body = {"messages": MESSAGES, "n": 3, "seed": 5, "temperature": 1.0}
    body |= {"response_format": {"type": "json_schema", "json_schema": NAMED}}
    whole = post(server, "/v1/chat/completions", **body).json()
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert all(map(is_object, texts))
    joined = ["", "", ""]
    events = post(server, "/v1/chat/completions", stream=True, **body).text.split("\n\n")
    for event in events[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            joined[choice["index"]] += choice["delta"].get("content", "")
    assert joined == texts


def test_any_object(server: Running) -> None:
    body = {"messages": MESSAGES, "response_format": {"type": "json_object"}, "max_tokens": 8}
    found = post(server, "/v1/chat/completions", **body).json()
    assert found["choices"][0]["message"]["content"].startswith("{")


def test_openais_client(server: Running) -> None:
    """Its `parse` makes the schema of a class, and the class of the answer."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        found = client.chat.completions.parse(
            model="demo", messages=MESSAGES, response_format=Colour, max_tokens=ENOUGH
        )
        assert isinstance(found.choices[0].message.parsed, Colour)
        response = client.responses.parse(
            model="demo", input="Name a colour.", text_format=Colour, max_output_tokens=ENOUGH
        )
        assert isinstance(response.output_parsed, Colour)
        assert response.text is not None and response.text.format is not None
        assert response.text.format.type == "json_schema"


def test_anthropics_client(server: Running) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        found = client.messages.create(
            model="demo",
            messages=MESSAGES,
            max_tokens=ENOUGH,
            output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        )
    (part,) = found.content
    assert part.type == "text" and is_object(part.text) and found.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs a schema"),
        ({"response_format": {}}, "response_format", "missing required field `type`"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "regex: "),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one text"),
        ({"json_schema": {"type": "foo"}}, "json_schema", "foo"),
        ({"json_schema": {"not": {}}}, "json_schema", "not"),
        ({"grammar": "root ::= missing"}, "grammar", "grammar"),
        ({"grammar": "a" * 270_000}, "grammar", "262144 bytes"),
        ({"grammar": GRAMMAR, "guided_regex": "a"}, "guided_regex", "exclude each other"),
    ],
)
def test_mistakes(server: Running, fields: dict[str, Any], param: str, message: str) -> None:
    """They are refused before anything runs, in streams too."""
    for stream in (False, True):
        found = post(server, "/v1/completions", prompt="A", stream=stream, **fields)
        assert found.status_code == 400, found.text
        assert found.json()["error"]["param"] == param
        assert message in found.json()["error"]["message"]


def test_answers_that_cannot_go_on(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their error has a code, in a stream too."""

    def push(matcher: Matcher, token: int) -> None:
        raise ConstraintError("planted")

    body = {"prompt": "A", "structured_outputs": {"regex": "[a-z]{8}"}}
    with monkeypatch.context() as patched:
        patched.setattr(Matcher, "push", push)
        found = post(server, "/v1/completions", **body)
        *_, last = post(server, "/v1/completions", stream=True, **body).text.strip().split("\n\n")
    assert found.status_code == 400
    for error in (found.json()["error"], json.loads(last.removeprefix("data: "))["error"]):
        assert (error["code"], error["message"]) == ("constraint_failed", "planted")
    assert post(server, "/v1/completions", **body).json()["choices"][0]["finish_reason"] == "stop"
