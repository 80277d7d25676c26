"""Routes, fields and options that clients of llama-server use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jax_q4k import models
from jax_q4k.models import cli
from jax_q4k.models.cli.commands.serve import settings_of

from .running import Running, serving
from .test_app import GREEDY, MESSAGES, post, streamed

TOOLS = [{"type": "function", "function": {"name": "tide_of", "parameters": {"type": "object"}}}]
TEMPLATE = """\
{%- for tool in tools or [] %}[{{ tool.function.name }}]{% endfor -%}
{{ messages[0].content }}{{ mood }}{% if add_generation_prompt %} ->{% endif %}"""


@pytest.fixture(scope="module")
def templated(engine: models.Engine) -> Iterator[Running]:
    """A server of any model's name whose operator chose the template and a variable of it."""
    tokenizer = engine.model.tokenizer
    assert tokenizer is not None
    engine.model.tokenizer = tokenizer.with_chat_template(TEMPLATE)
    try:
        with serving(engine, template_variables={"mood": "!"}, any_model=True) as server:
            yield server
    finally:
        engine.model.tokenizer = tokenizer


@pytest.mark.parametrize(
    ("path", "alias"),
    [
        ("/v1/chat/completions", "/chat/completions"),
        ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"),
        ("/v1/responses", "/responses"),
        ("/v1/responses/input_tokens", "/responses/input_tokens"),
    ],
)
def test_posts_without_v1(server: Running, path: str, alias: str) -> None:
    body = {"messages": MESSAGES, "input": "Where is the sea?", "temperature": 0}
    body |= {"max_output_tokens": 2} if "responses" in path else {"max_tokens": 2}
    ours, theirs = (post(server, one, **body) for one in (path, alias))
    assert ours.status_code == theirs.status_code == 200
    assert ours.json().keys() == theirs.json().keys()


def test_gets_without_v1(server: Running) -> None:
    for path, alias in (("/v1/models", "/models"), ("/v1/models/demo", "/models/demo")):
        assert server.client.get(path).json() == server.client.get(alias).json()
    assert server.client.get("/v1/health").json() == {"status": "ok"}
    assert server.client.get("/completion").status_code == 404


def test_health_needs_no_key(engine: models.Engine) -> None:
    with serving(engine, api_keys=("secret",)) as server:
        assert server.client.get("/v1/health").status_code == 200
        assert server.client.get("/models").status_code == 401


def test_counts_of_tokens(server: Running) -> None:
    used = post(server, "/v1/chat/completions", messages=MESSAGES, **GREEDY).json()["usage"]
    found = post(server, "/v1/chat/completions/input_tokens", messages=MESSAGES)
    assert found.json() == {"input_tokens": used["prompt_tokens"]}
    found = post(server, "/v1/responses/input_tokens", input=MESSAGES[0]["content"])
    assert found.json()["input_tokens"] == used["prompt_tokens"]
    assert found.json()["object"] == "response.input_tokens"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["Rivers that meet", "Hills"]}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
    ],
)
def test_timings_agree_with_the_usage(server: Running, path: str, body: dict[str, Any]) -> None:
    body = {**body, **GREEDY, "n": 2, "ignore_eos": True}
    for fields in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        whole = not fields
        last = (
            post(server, path, **body).json()
            if whole
            else streamed(server, path, **body, **fields)[-1]
        )
        usage, timings = last["usage"], last["timings"]
        assert timings["predicted_n"] == usage["completion_tokens"]
        assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
        answers = len(body.get("prompt", "1")) * 2
        decoded = timings["predicted_n"] - answers
        rate = decoded / timings["predicted_ms"] * 1e3
        assert timings["predicted_per_second"] == pytest.approx(rate)
        assert timings["predicted_per_token_ms"] * rate == pytest.approx(1e3)
        assert timings["prompt_ms"] > 0 and timings["prompt_per_second"] > 0


def test_a_stream_without_usage_has_timings_of_each_answer(server: Running) -> None:
    chunks = streamed(server, "/v1/completions", prompt="The sea", n=2, **GREEDY)
    timed = [chunk for chunk in chunks if "timings" in chunk]
    assert [chunk["choices"][0]["finish_reason"] for chunk in timed] == ["length"] * 2
    assert [chunk["timings"]["predicted_n"] for chunk in timed] == [24, 24]


def test_timings_of_a_single_token_are_finite(server: Running) -> None:
    found = post(server, "/v1/completions", prompt="The sea", max_tokens=1).json()["timings"]
    assert found["predicted_n"] == 1 and found["predicted_per_second"] == 0
    assert all(isinstance(value, int | float) for value in found.values())


def test_pieces_of_tokens(server: Running) -> None:
    found = post(server, "/tokenize", content="The sea 🤗", with_pieces=True).json()
    ids = post(server, "/tokenize", content="The sea 🤗").json()["tokens"]
    assert [one["id"] for one in found["tokens"]] == ids and found["count"] == len(ids)
    raw = [
        bytes(piece) if isinstance(piece, list) else piece.encode()
        for piece in (one["piece"] for one in found["tokens"])
    ]
    assert b"".join(raw).decode() == "The sea 🤗"
    assert any(isinstance(one["piece"], list) for one in found["tokens"])


def test_any_model(templated: Running, server: Running) -> None:
    body: dict[str, Any] = {"model": "gpt-4.1", "messages": MESSAGES, "max_tokens": 2}
    assert post(templated, "/v1/chat/completions", **body).json()["model"] == "demo"
    assert post(server, "/v1/chat/completions", **body).status_code == 404


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({}, "Hi! ->"),
        ({"chat_template_kwargs": {"mood": "?"}}, "Hi? ->"),
        ({"add_generation_prompt": False}, "Hi!"),
        ({"tools": TOOLS}, "[tide_of]Hi! ->"),
        ({"tools": []}, "Hi! ->"),
    ],
)
def test_templates_of_the_operator(templated: Running, body: dict[str, Any], prompt: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert post(templated, "/apply-template", messages=messages, **body).json() == {
        "prompt": prompt
    }


def test_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variables = json.dumps({"enable_thinking": False})
    options = cli.parse(["serve", "--demo", "--any-model", "--chat-template-kwargs", variables])
    settings = settings_of(options)
    assert settings.any_model and settings.template_variables == {"enable_thinking": False}
    assert not settings_of(cli.parse(["serve", "--demo"])).any_model
    with pytest.raises(SystemExit):
        cli.parse(["serve", "--demo", "--chat-template-kwargs", "[]"])
    assert "'[]' must be a JSON object" in capsys.readouterr().err
    missing = str(tmp_path / "none.jinja")
    assert cli.main(["serve", "--demo", "--port", "0", "--chat-template-file", missing]) == 2
    assert "none.jinja" in capsys.readouterr().err
