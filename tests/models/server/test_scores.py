"""Log-probabilities of prompts over HTTP, and embeddings in the engine's batch."""

from __future__ import annotations

import base64
import dataclasses
import math
from typing import Any

import httpx
import numpy as np
import pytest

from jax_q4k import models

from ..engine.engine_runs import Gate, is_idle, wait_until
from .running import Running
from .test_app import GREEDY, MESSAGES, post, streamed

PROMPT = "The sea was calm, and nobody"


def merged(chunks: list[Any]) -> Any:
    """Returns text and log-probabilities of a stream's only answer."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    logprobs = {name: [x for part in found for x in part[name]] for name in found[0]}
    return "".join(choice["text"] for choice in choices), logprobs


@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echo_with_logprobs(engine: models.Engine, server: Running, as_ids: bool) -> None:
    """OpenAI's form, which lm-evaluation-harness reads, whole and streamed."""
    tokenizer = engine.model.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(PROMPT)
    want = engine.generate(ids, max_new_tokens=4, logprobs=1, prompt_logprobs=1)
    body = {"prompt": [ids] if as_ids else PROMPT, "echo": True, "logprobs": 1, **GREEDY}
    body |= {"max_tokens": 4}
    choice = post(server, "/v1/completions", **body).json()["choices"][0]
    found, count = choice["logprobs"], len(ids)
    assert choice["text"] == PROMPT + want.text
    assert {len(values) for values in found.values()} == {count + 4}
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    entries = [*want.prompt_logprobs[1:], *want.logprobs]
    values = [one.logprob for one in entries]
    np.testing.assert_allclose(found["token_logprobs"][1:], values, atol=1e-3)
    assert all(len(top) == 1 for top in found["top_logprobs"][1:])
    for offset, token in list(zip(found["text_offset"], found["tokens"], strict=True))[2:]:
        assert choice["text"].startswith(token, offset)
    assert found["text_offset"][:2] == [0, 0]  # BOS is no part of the text
    assert found["text_offset"][count] == len(PROMPT)
    text, logprobs = merged(streamed(server, "/v1/completions", **body))
    assert text == choice["text"]
    for name in ("tokens", "text_offset"):
        assert logprobs[name] == found[name]
    np.testing.assert_allclose(logprobs["token_logprobs"][1:], values, atol=1e-3)


@pytest.mark.parametrize("stream", [False, True])
def test_scores_of_a_prompt_alone(server: Running, stream: bool) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 0}
    if stream:
        text, logprobs = merged(streamed(server, "/v1/completions", **body))
    else:
        answer = post(server, "/v1/completions", **body).json()
        choice = answer["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
    assert text == PROMPT
    assert (
        len(logprobs["tokens"])
        == post(server, "/tokenize", content=PROMPT, add_special=True).json()["count"]
    )
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])


def test_an_end_token_is_the_answers(engine: models.Engine, server: Running) -> None:
    """The last entry of a scored echo is the new token, also if that ends the text."""
    tokenizer = engine.model.tokenizer
    assert tokenizer is not None
    bias = {str(tokenizer.eos_token_ids[0]): 100}
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 1, "logit_bias": bias}
    plain = post(server, "/v1/completions", **body | {"logit_bias": {}, "temperature": 0}).json()
    for stream in (False, True):
        if stream:
            text, logprobs = merged(streamed(server, "/v1/completions", **body))
        else:
            choice = post(server, "/v1/completions", **body).json()["choices"][0]
            text, logprobs = choice["text"], choice["logprobs"]
            assert choice["finish_reason"] == "stop"
        assert text == PROMPT and logprobs["tokens"][-1] == "<|endoftext|>"
        want = plain["choices"][0]["logprobs"]["token_logprobs"][:-1]
        np.testing.assert_allclose(logprobs["token_logprobs"][1:-1], want[1:], atol=1e-3)


def test_vllms_prompt_logprobs(engine: models.Engine, server: Running) -> None:
    """Choices of completions have them, and a chat's answer once."""
    tokenizer = engine.model.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(PROMPT)
    body = {"prompt_logprobs": 2, "max_tokens": 1, "temperature": 0}
    several = post(server, "/v1/completions", prompt=[PROMPT, "A"], **body).json()["choices"]
    entries = several[0]["prompt_logprobs"]
    assert len(entries) == len(ids) and entries[0] is None
    assert len(several[1]["prompt_logprobs"]) == len(tokenizer.encode("A"))
    want = engine.generate(ids, max_new_tokens=1, prompt_logprobs=2).prompt_logprobs
    for token, entry, one in zip(ids[1:], entries[1:], want[1:], strict=True):
        own = entry[str(token)]
        assert own["logprob"] == pytest.approx(one.logprob, abs=1e-3)
        assert own["decoded_token"] == tokenizer.token_bytes(token).decode()
        assert own["rank"] == one.rank and len(entry) in (2, 3)
        assert {1, 2} <= {other["rank"] for other in entry.values()}
    chat = post(server, "/v1/chat/completions", messages=MESSAGES, **body).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    # With an echo, each field has as many as it asks for.
    body |= {"echo": True, "logprobs": 0}
    choice = post(server, "/v1/completions", prompt=PROMPT, **body).json()["choices"][0]
    assert choice["logprobs"]["top_logprobs"][1] == {}
    assert choice["prompt_logprobs"][1].keys() == entries[1].keys()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "A", "prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "A", "prompt_logprobs": 0, "stream": True}, "with stream"),
        ("/v1/completions", {"prompt": "A", "max_tokens": 0, "echo": True}, "max_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES, "prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/embeddings", {"input": "A", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "A", "dimensions": 10**6}, "dimensions"),
    ],
)
def test_mistakes(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    found = post(server, path, **body)
    assert found.status_code == 400 and param in found.json()["error"]["param"]


@pytest.mark.parametrize("form", ["float", "base64"])
def test_dimensions(engine: models.Engine, server: Running, form: str) -> None:
    texts = ["The sea", PROMPT, *["A"] * 8]  # more than the engine has rows
    whole = engine.embed([engine.model.tokenizer.encode(text) for text in texts])  # type: ignore[union-attr]
    body = {"input": texts, "dimensions": 16, "encoding_format": form}
    data = post(server, "/v1/embeddings", **body).json()["data"]
    assert [one["index"] for one in data] == list(range(len(texts)))
    for one, vector in zip(data, whole, strict=True):
        found = one["embedding"]
        if form == "base64":
            found = np.frombuffer(base64.b64decode(found), "<f4")
        want = vector[:16] / math.sqrt((vector[:16] ** 2).sum())
        np.testing.assert_allclose(found, want, atol=1e-5)
    size = engine.model.config.hidden_size
    assert post(server, "/v1/embeddings", input="A", dimensions=size).status_code == 200


def test_a_client_that_leaves_embeddings(engine: models.Engine, server: Running) -> None:
    """Its texts are cancelled, also those that no row has yet, and its place is free."""
    with Gate(engine):
        with pytest.raises(httpx.ReadTimeout):
            texts = [PROMPT] * 9
            server.client.post("/v1/embeddings", json={"input": texts}, timeout=0.3)
        wait_until(lambda: server.service.places.taken == 0)
    wait_until(lambda: is_idle(engine))
    assert post(server, "/v1/embeddings", input="A").status_code == 200


def test_embeddings_beyond_the_time_limit(
    engine: models.Engine, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = dataclasses.replace(server.service.settings, seconds=0.2)
    monkeypatch.setattr(server.service, "settings", short)
    with Gate(engine):
        assert post(server, "/v1/embeddings", input="A").status_code == 408
    wait_until(lambda: is_idle(engine))
