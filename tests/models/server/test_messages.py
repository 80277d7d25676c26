"""Anthropic's API, by its client and by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from jax_q4k.models.engine.answers import PieceReader

from .running import Running

MESSAGES: list[Any] = [{"role": "user", "content": "Where is the sea?"}]
GREEDY: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "temperature": 0}
#: The same for the client, which has no parameter for the temperature.
OPTIONS: dict[str, Any] = {
    "model": "demo",
    "messages": MESSAGES,
    "extra_body": {"temperature": 0},
}


@pytest.fixture
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_whole_and_streamed(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**OPTIONS, max_tokens=20)
    (block,) = whole.content
    assert block.type == "text" and whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 20
    with client.messages.stream(**OPTIONS, max_tokens=20) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text == final.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 20
    total = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    count = client.messages.count_tokens(model="demo", messages=MESSAGES)
    assert count.input_tokens == total


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    text = client.messages.create(**OPTIONS, max_tokens=20).content[0].text  # type: ignore[union-attr]
    stop = text[8:12]
    cut = client.messages.create(**OPTIONS, max_tokens=20, stop_sequences=["never", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]  # type: ignore[union-attr]


def test_a_system_prompt_is_part_of_the_prompt(client: anthropic.Anthropic) -> None:
    def count(**fields: Any) -> int:
        return client.messages.count_tokens(model="demo", messages=MESSAGES, **fields).input_tokens

    system = "You are a sailor."
    assert count(system=system) > count()
    # The demo model has no chat template; a transcript shows parts as they are.
    assert count(system=[{"type": "text", "text": system}]) > count()


def test_names_of_events(server: Running) -> None:
    body = {**GREEDY, "max_tokens": 4, "stream": True}
    with server.client.stream("POST", "/v1/messages", json=body) as response:
        events = response.read().decode().strip().split("\n\n")
    pairs = [one.split("\n") for one in events]
    names = [name.removeprefix("event: ") for name, _ in pairs]
    assert names == [json.loads(data.removeprefix("data: "))["type"] for _, data in pairs]
    deltas = ["content_block_delta"] * names.count("content_block_delta")
    begin, end = ["message_start", "content_block_start"], ["content_block_stop", "message_delta"]
    assert names == [*begin, *deltas, *end, "message_stop"] and deltas


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 4, "messages": []}, "messages is empty"),
        ({"max_tokens": 4, "tools": [{"name": "f"}]}, "has no tool calls"),
        ({"max_tokens": 4, "tool_choice": {"type": "x"}}, "tool_choice.type must be auto"),
        ({"max_tokens": 4, "tools": [{"type": "bash_20250124"}]}, "a tool of the client's own"),
        ({"max_tokens": 4, "temperature": -1}, "temperature"),
    ],
)
def test_mistakes(server: Running, fields: dict[str, Any], message: str) -> None:
    found = server.client.post("/v1/messages", json={**GREEDY, **fields})
    assert found.status_code == 400
    error = found.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert message in error["error"]["message"]


def test_an_error_in_a_stream(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(PieceReader, "read", fails)
    body = {**GREEDY, "max_tokens": 4, "stream": True}
    with server.client.stream("POST", "/v1/messages", json=body) as response:
        *_, last = response.read().decode().strip().split("\n\n")
    name, data = last.split("\n")
    assert name == "event: error"
    error = {"type": "api_error", "message": "internal error"}
    assert json.loads(data.removeprefix("data: ")) == {"type": "error", "error": error}


def test_errors_of_the_client(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="available: demo"):
        client.messages.create(**{**OPTIONS, "model": "other"}, max_tokens=4)


def test_models(client: anthropic.Anthropic) -> None:
    (found,) = client.models.list().data
    assert (found.id, found.type, found.display_name) == ("demo", "model", "demo")
    assert found.created_at.year >= 2026
