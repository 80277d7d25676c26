"""OpenAI's Responses API, by its client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from .running import Running

GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0, "max_output_tokens": 20}


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.responses.create(input="Where is the sea?", instructions="Be brief.", **GREEDY)
    assert whole.status == "incomplete" and whole.output_text
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None and whole.usage.output_tokens == 20
    items: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Where is the sea?"}]},
    ]
    events = list(client.responses.create(input=items, stream=True, **GREEDY))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text
    (last,) = (event for event in events if event.type == "response.incomplete")
    assert last.response.output_text == text and last is events[-1]


def test_the_conversation_goes_on(client: openai.OpenAI) -> None:
    """Sends an answer's items back, as a client without stored responses does."""
    first = client.responses.create(input="Where is the sea?", **GREEDY)
    items: list[Any] = [{"role": "user", "content": "Where is the sea?"}]
    items += [item.model_dump() for item in first.output]
    items.append({"role": "user", "content": "And the moon?"})
    second = client.responses.create(input=items, **GREEDY)
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + 20


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": [{"type": "input_image"}]}, "input"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_mistakes(server: Running, fields: dict[str, Any], param: str) -> None:
    found = server.client.post("/v1/responses", json={"input": "A", **GREEDY, **fields})
    assert found.status_code == 400 and found.json()["error"]["param"] == param
