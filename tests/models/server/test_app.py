"""Completions and chats over HTTP, whole and streamed, by OpenAI's client and by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jax_q4k import models
from jax_q4k.models.chat import transcript
from jax_q4k.models.engine.prompt_results import normalized
from jax_q4k.models.server import app, events

from ..engine.engine_runs import is_idle, wait_until
from .running import Running, serving

MESSAGES = [{"role": "user", "content": "Where is the sea?"}]
#: Greedy sampling, under the names of requests.
GREEDY = {"temperature": 0, "max_tokens": 24}
#: Pieces and batches of a text round int8 activations in another way.
ROUNDING = 0.01


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(server: Running, path: str, **body: Any) -> Any:
    return server.client.post(path, json=body)


def streamed(server: Running, path: str, **body: Any) -> list[Any]:
    """Returns the data of a stream's events; the last one must be [DONE]."""
    with server.client.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        text = response.read().decode()
    events = [one.removeprefix("data: ") for one in text.split("\n\n") if one.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(one) for one in events]


def test_a_completion_is_the_engines(engine: models.Engine, server: Running) -> None:
    want = engine.generate("The sea", max_new_tokens=24)
    found = post(server, "/v1/completions", model="demo", prompt="The sea", **GREEDY)
    assert found.status_code == 200 and "jax-q4k-ignored" not in found.headers
    body = found.json()
    assert body["choices"][0]["text"] == want.text
    assert body["choices"][0]["finish_reason"] == "length"
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 24)
    ids = engine.model.tokenizer.encode("The sea")  # type: ignore[union-attr]
    several = post(server, "/v1/completions", prompt=[ids, ids], **GREEDY).json()["choices"]
    assert [one["text"] for one in several] == [want.text] * 2


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 3}])
def test_a_streamed_chat_is_the_whole_one(server: Running, fields: dict[str, Any]) -> None:
    options = {"messages": MESSAGES, "seed": 2**40 + 7, "max_tokens": 24, **fields}
    whole = post(server, "/v1/chat/completions", **options).json()
    usage = {"stream_options": {"include_usage": True}}
    chunks = streamed(server, "/v1/chat/completions", **options, **usage)
    for want in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == want["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["length"]
        assert own[-1]["delta"] == {}
        text = "".join(c["delta"].get("content", "") for c in own)
        assert text == want["message"]["content"]
        if want["logprobs"] is not None:
            parts = [c["logprobs"]["content"] for c in own if c["logprobs"]]
            assert [one for part in parts for one in part] == want["logprobs"]["content"]
            assert len(want["logprobs"]["content"]) == 24
    assert len(whole["choices"]) == fields.get("n", 1)
    counts = "prompt_tokens", "completion_tokens", "total_tokens"
    assert [chunks[-1]["usage"][name] for name in counts] == [whole["usage"][n] for n in counts]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_openais_client(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "jax-q4k"
    options: dict[str, Any] = {"model": "demo", "messages": MESSAGES, **GREEDY}
    chat = client.chat.completions.create(**options)
    stream = client.chat.completions.create(**options, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == chat.choices[0].message.content != ""
    completion = client.completions.create(model="demo", prompt="The sea", logprobs=2, **GREEDY)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert "".join(logprobs.tokens) == completion.choices[0].text
    with pytest.raises(openai.NotFoundError, match="available: demo"):
        client.chat.completions.create(**{**options, "model": "other"})
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(
            **options, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert (raised.value.param, raised.value.code) == ("tools", "unsupported_parameter")


def test_embeddings(engine: models.Engine, client: openai.OpenAI) -> None:
    """OpenAI's client asks for base64 unless told otherwise."""
    texts = ["The sea", "It is a truth universally acknowledged"]
    want = models.embed(engine.model, texts, normalize=True)
    found = client.embeddings.create(model="demo", input=texts)
    np.testing.assert_allclose([one.embedding for one in found.data], want, atol=ROUNDING)
    ids = [engine.model.tokenizer.encode(text) for text in texts]  # type: ignore[union-attr]
    floats = client.embeddings.create(model="demo", input=ids, encoding_format="float")
    np.testing.assert_allclose([one.embedding for one in floats.data], want, atol=ROUNDING)
    assert found.usage.prompt_tokens == floats.usage.prompt_tokens == sum(map(len, ids))
    (short,) = client.embeddings.create(model="demo", input=texts[:1], dimensions=3).data
    np.testing.assert_allclose(
        short.embedding, normalized(np.array(found.data[0].embedding[:3])), atol=0.05
    )
    with pytest.raises(openai.BadRequestError, match="input has 601 tokens"):
        client.embeddings.create(model="demo", input=[5] * 601)


def test_openais_async_client(server: Running) -> None:
    async def run() -> set[str | None]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            tasks = [
                client.completions.create(model="demo", prompt="The sea", **GREEDY)
                for _ in range(6)
            ]
            return {found.choices[0].text for found in await asyncio.gather(*tasks)}

    assert len(asyncio.run(run())) == 1


def test_stop_strings_do_not_leak(server: Running) -> None:
    text = post(server, "/v1/completions", prompt="The sea", **GREEDY).json()["choices"][0]["text"]
    stop = text[6:10]
    options = {"prompt": "The sea", "stop": [stop, "never"], **GREEDY}
    whole = post(server, "/v1/completions", **options).json()["choices"][0]
    assert whole["text"] == text[: text.index(stop)] and whole["finish_reason"] == "stop"
    chunks = streamed(server, "/v1/completions", **options)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_seeds(server: Running) -> None:
    def text(seed: int | None) -> str:
        options = {"temperature": 1.5, "max_tokens": 12, "seed": seed}
        found = post(server, "/v1/completions", prompt="The sea", **options)
        return str(found.json()["choices"][0]["text"])

    assert text(3) == text(3) != text(3 + 2**32)
    assert text(-(2**63)) == text(-(2**63))
    assert text(-1) != text(-1) or text(None) != text(None)


@pytest.mark.parametrize("stream", [False, True])
def test_the_seed_of_an_answer_gives_it_again(server: Running, stream: bool) -> None:
    options = {"temperature": 1.5, "max_tokens": 12, "prompt": "The sea", "stream": stream}
    first = post(server, "/v1/completions", **options)
    seed = int(first.headers["jax-q4k-seed"])

    def text(response: Any) -> str:
        return "".join(re.findall(r'"text":"(.*?)"', response.text))

    again = post(server, "/v1/completions", **options, seed=seed)
    assert text(again) == text(first) and again.headers["jax-q4k-seed"] == str(seed)
    other = post(server, "/v1/completions", **options, seed=seed + 1)
    assert text(other) != text(first) and other.headers["jax-q4k-seed"] == str(seed + 1)


def test_penalties_count_the_answer_alone(server: Running) -> None:
    """A large penalty of presence does not keep words of the prompt from the answer."""
    prompt = "Tom went to the sea. Tom went to the"
    options = {"prompt": prompt, "temperature": 0, "max_tokens": 1}
    plain = post(server, "/v1/completions", **options).json()["choices"][0]["text"]
    assert plain.strip() in prompt
    penalized = post(server, "/v1/completions", **options, presence_penalty=50).json()
    assert penalized["choices"][0]["text"] == plain


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_come_back(engine: models.Engine, server: Running, stream: bool) -> None:
    """`echo` gives their text, `return_token_ids` their ids and those of the answers."""
    ids = engine.model.tokenizer.encode("The moon")  # type: ignore[union-attr]
    options = {"temperature": 0, "max_tokens": 6, "return_token_ids": True, "n": 2}
    want = [engine.generate(prompt, max_new_tokens=6) for prompt in ("The sea", "The moon")]
    texts: list[str] = [""] * 4
    tokens: list[list[int]] = [[] for _ in range(4)]
    prompts: dict[int, list[int]] = {}
    for prompt, first in (("The sea", 0), ([ids], 2)):
        body = {"prompt": prompt, "echo": True, **options}
        if stream:
            answers = streamed(server, "/v1/completions", **body)
        else:
            answers = [post(server, "/v1/completions", **body).json()]
        for choice in (choice for answer in answers for choice in answer["choices"]):
            at = first + choice["index"]
            texts[at] += choice["text"]
            tokens[at] += choice.get("token_ids", [])
            prompts |= {at: choice["prompt_token_ids"]} if "prompt_token_ids" in choice else {}
    starts = ["The sea", "The sea", *[engine.model.tokenizer.decode(ids)] * 2]  # type: ignore[union-attr]
    assert texts == [start + str(want[i // 2].text) for i, start in enumerate(starts)]
    assert tokens == [want[i // 2].tokens for i in range(4)]
    assert prompts[2] == prompts[3] == ids and prompts[0] == prompts[1]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_a_chat(server: Running, stream: bool) -> None:
    body = {"messages": MESSAGES, "return_token_ids": True, "stop": "zz", **GREEDY}
    if stream:
        first, *chunks = streamed(server, "/v1/chat/completions", **body)
        tokens = [id for chunk in chunks for id in chunk["choices"][0].get("token_ids", [])]
    else:
        first = post(server, "/v1/chat/completions", **body).json()
        tokens = first["choices"][0]["token_ids"]
    texts = [
        post(server, "/detokenize", tokens=ids).json()["content"]
        for ids in (first["prompt_token_ids"], tokens)
    ]
    assert texts[0].endswith("User: Where is the sea?\nAssistant:")
    whole = post(server, "/v1/chat/completions", messages=MESSAGES, **GREEDY).json()
    assert texts[1].strip() == whole["choices"][0]["message"]["content"].strip()


def test_an_answer_continues_a_message(engine: models.Engine, server: Running) -> None:
    """`continue_final_message`, and Anthropic's API for a last message of the assistant."""
    messages = [*MESSAGES, {"role": "assistant", "content": "The sea is"}]
    prompt = "User: Where is the sea?\nAssistant: The sea is"
    want = engine.generate(prompt, max_new_tokens=8, stop="\nUser:")
    options = {"messages": messages, "max_tokens": 8, "temperature": 0}
    path = "/v1/chat/completions"
    found = post(server, path, continue_final_message=True, **options).json()
    assert found["choices"][0]["message"]["content"] == want.text
    anthropic = post(server, "/v1/messages", **options).json()
    assert anthropic["content"][0]["text"] == want.text
    new = post(server, path, **options).json()
    assert new["usage"]["prompt_tokens"] > found["usage"]["prompt_tokens"]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    for wrong in ({**options, **both}, {"messages": MESSAGES, "continue_final_message": True}):
        refused = post(server, path, **wrong)
        assert refused.status_code == 400
        assert "continue_final_message" in refused.json()["error"]["message"]


def test_when_an_answer_ends(engine: models.Engine, server: Running) -> None:
    text = engine.generate("The sea", max_new_tokens=24).text
    assert text is not None
    tokens = engine.generate("The sea", max_new_tokens=24).tokens
    body = {"prompt": "The sea", **GREEDY, "return_token_ids": True}
    stopped = post(server, "/v1/completions", stop_token_ids=[tokens[7]], **body).json()
    choice = stopped["choices"][0]
    assert choice["token_ids"] == tokens[: tokens.index(tokens[7])]
    assert choice["finish_reason"] == "stop"
    stop = text[len(text) // 3]
    early = post(server, "/v1/completions", stop=stop, **body).json()["choices"][0]
    late = post(server, "/v1/completions", stop=stop, min_tokens=20, **body).json()["choices"][0]
    assert len(early["token_ids"]) < 20 <= len(late["token_ids"])
    for name, value in {"min_tokens": 25, "stop_token_ids": [10**6]}.items():
        error = post(server, "/v1/completions", **body, **{name: value}).json()["error"]
        assert error["param"] == name


def test_unknown_names_are_listed(server: Running) -> None:
    found = post(server, "/v1/completions", prompt="A", max_tokens=1, foo=1, bar=None)
    assert found.status_code == 200 and found.headers["jax-q4k-ignored"] == "bar, foo"
    strange = post(server, "/v1/completions", prompt="A", max_tokens=1, **{"Ω\r\nx: y": 1})
    assert strange.headers["jax-q4k-ignored"] == r"\u03a9\r\nx: y"
    for names, want in {
        (" ",): "' '",
        ("", "a "): "'', 'a '",
        ("a" * 998, "b"): "a" * 998 + ",",
    }.items():
        found = post(server, "/v1/completions", prompt="A", max_tokens=1, **dict.fromkeys(names))
        assert (found.status_code, found.headers["jax-q4k-ignored"]) == (200, want)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/completions", {"prompt": "A", "max_tokens": "x"}, "max_tokens", "Expected `int"),
        ("/v1/completions", {"prompt": "A", "max_tokens": 0}, "max_tokens", "at least 1"),
        ("/v1/completions", {"prompt": "A", "temperature": -1}, "temperature", "in [0, 100]"),
        ("/v1/completions", {"prompt": "A", "n": 17}, "n", "1 to 16"),
        ("/v1/completions", {"prompt": "A", "n": 9}, None, "more than the 8 places"),
        ("/v1/completions", {"prompt": []}, "prompt", "is empty"),
        ("/v1/completions", {"prompt": [1.5]}, "prompt", "must be a text"),
        ("/v1/completions", {"prompt": [2**70]}, "prompt", "ids must be 0 to 4095"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "x" * 9, "content": 1}]},
            "messages",
            "int",
        ),
        ("/v1/completions", {"prompt": "A", "stop": ["x"] * 17}, "stop", "16 strings"),
        ("/v1/completions", {"prompt": "A", "seed": 2**64}, "seed", "64 bits"),
        ("/v1/completions", {"prompt": "A", "suffix": "B"}, "suffix", "not supported"),
        ("/v1/completions", {"prompt": "A", "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ("/v1/completions", {"prompt": "A " * 600}, None, "context length is 512"),
        ("/v1/completions", {"prompt": "A" * 1_000_000}, "prompt", "too many for a context"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "A" * 1000}] * 40},
            "messages",
            "40160 characters, too many",
        ),
        ("/v1/chat/completions", {}, None, "missing required field `messages`"),
        ("/v1/chat/completions", {"messages": []}, "messages", "is empty"),
        ("/v1/chat/completions", {"messages": [{}]}, "messages", "role is of type"),
        ("/tokenize", {}, "content", "is missing"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "-1"),
    ],
)
def test_mistakes(
    server: Running, path: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    found = post(server, path, **body)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert message in error["message"] and error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_bodies(server: Running) -> None:
    headers = {"content-type": "application/json"}

    def answer(content: bytes, **more: str) -> tuple[int, str]:
        found = server.client.post("/v1/completions", content=content, headers=headers | more)
        return found.status_code, found.json()["error"]["message"]

    assert answer(b"{") == (400, "the body is not JSON: Input data was truncated")
    assert answer(b"[]") == (400, "the body must be a JSON object")
    deep = b'{"prompt": "A", "x": ' + b"[" * 70 + b"]" * 70 + b"}"
    assert answer(deep) == (400, "the body has more than 64 nested arrays and objects")
    assert answer(b'{"x": ' + b"[" * 100_000)[0] == 400
    assert answer(b" " * (9 << 20))[0] == 413
    wrong = {"content-type": "text/plain"}
    assert answer(b'{"prompt": "A"}', **wrong)[0] == 415
    found = server.client.get("/v1/completions")
    assert (found.status_code, found.json()["error"]["message"]) == (
        405,
        "the method is not allowed",
    )
    assert server.client.get("/nothing").json()["error"]["message"] == "there is no /nothing"


def test_tokens(server: Running) -> None:
    tokens = post(server, "/tokenize", content="The sea").json()["tokens"]
    assert post(server, "/detokenize", tokens=tokens).json() == {"content": "The sea"}
    prompt = post(server, "/apply-template", messages=MESSAGES).json()["prompt"]
    assert MESSAGES[0]["content"] in prompt


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_work(
    engine: models.Engine, server: Running, stream: bool
) -> None:
    """Leaves in the middle of answers; two of the requests wait for a row."""
    import socket

    def cancelled() -> float:
        lines = server.client.get("/metrics").text.splitlines()
        (line,) = (one for one in lines if 'success_total{finished_reason="cancelled"}' in one)
        return float(line.split()[-1])

    before, left = engine.stats().new_tokens, cancelled()
    body = json.dumps(
        {"prompt": "The sea", "max_tokens": 400, "ignore_eos": True, "stream": stream}
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    request = f"{head}Content-Type: application/json\r\n\r\n{body}".encode()
    host, _, port = server.url.removeprefix("http://").partition(":")
    connections = [socket.create_connection((host, int(port))) for _ in range(6)]
    for connection in connections:
        connection.sendall(request)
    wait_until(lambda: engine.stats().running == 4 and engine.stats().new_tokens > before + 8)
    assert server.service.places.taken == 6
    for connection in connections:
        connection.close()
    wait_until(lambda: is_idle(engine) and server.service.places.taken == 0, 5)
    assert engine.stats().new_tokens < before + 6 * 300
    assert cancelled() == left + 6
    engine.check()


def test_openapi_describes_every_route(server: Running) -> None:
    found = server.client.get("/openapi.json").json()
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in app().routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
        if route.include_in_schema
    }
    said = {(path, method) for path, methods in found["paths"].items() for method in methods}
    assert said == routes
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(found)))
    assert names == set(found["components"]["schemas"])
    chat = found["components"]["schemas"]["ChatCompletion"]
    assert chat["required"] == ["messages"] and "temperature" in chat["properties"]


def test_only_streams_make_steps_short(
    engine: models.Engine, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks at the engine's requests whenever it plans a step."""
    steps, seen = engine._loop._steps, []

    def look() -> int:
        seen.append([request.is_streamed for request in engine._loop.requests])
        return steps()

    monkeypatch.setattr(engine._loop, "_steps", look)
    body = {"prompt": "The sea", "max_tokens": 100, "ignore_eos": True}
    streamed(server, "/v1/completions", **body)
    assert seen[-1] == [True]
    seen.clear()
    post(server, "/v1/completions", **body)
    assert seen and all(ones == [False] for ones in seen)


def test_places_are_free_before_the_end_of_a_stream_is_sent(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may send its next request as soon as it has read [DONE]."""
    part, taken = events._part, []

    def look(body: bytes) -> Any:
        taken.append((body == events.DONE, server.service.places.taken))
        return part(body)

    monkeypatch.setattr(events, "_part", look)
    streamed(server, "/v1/completions", prompt="The sea", **GREEDY)
    assert taken[0] == (False, 1) and taken[-1] == (True, 0)


def test_a_full_queue_answers_at_once(engine: models.Engine, server: Running) -> None:
    server.service.places.take(8)
    try:
        found = post(server, "/v1/completions", prompt="A", max_tokens=1)
    finally:
        server.service.places.give_back(8)
    assert found.status_code == 429 and found.headers["retry-after"] == "1"
    assert found.json()["error"]["code"] == "queue_full"
    assert post(server, "/v1/completions", prompt="A", max_tokens=1).status_code == 200


def test_metrics(engine: models.Engine, server: Running) -> None:
    def read() -> dict[str, float]:
        found = server.client.get("/metrics")
        assert found.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = text_string_to_metric_families(found.text)
        samples = [sample for family in families for sample in family.samples]
        return {
            " ".join([sample.name, *sample.labels.values()]): sample.value for sample in samples
        }

    before = read()
    assert post(server, "/v1/completions", prompt="The sea", **GREEDY).status_code == 200
    assert post(server, "/v1/completions", prompt="A", suffix="B").status_code == 400
    after = read()
    grown = {
        name.removeprefix("jax_q4k:"): value - before.get(name, 0)
        for name, value in after.items()
        if not name.endswith("_created") and value != before.get(name, 0)
    }
    assert grown["generation_tokens_total"] == 24 and grown["prompt_tokens_total"] == 3
    assert grown["request_success_total length"] == 1
    assert grown["requests_rejected_total unsupported_parameter"] == 1
    first, queue, prefill = "time_to_first_token", "request_queue_time", "request_prefill_time"
    for name in (first, "inter_token_latency", "e2e_request_latency", queue, prefill):
        assert grown[f"{name}_seconds_count"] == 1 and grown[f"{name}_seconds_sum"] > 0
    assert sum(grown[f"{name}_seconds_sum"] for name in (queue, prefill)) == pytest.approx(
        grown[f"{first}_seconds_sum"]
    )
    assert grown["iteration_tokens_total_count"] == grown["steps_total"]
    assert grown["iteration_tokens_total_sum"] == 3 + 23  # the prompt gives the first token
    assert after["jax_q4k:spec_decode_num_draft_tokens_total"] == 0
    assert after["jax_q4k:num_requests_running"] == 0


def test_health(engine: models.Engine, server: Running) -> None:
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/health?generate=1").json() == {"status": "ok"}
    with serving(None) as loading:
        found = loading.client.get("/health")
        assert (found.status_code, found.json()["error"]["message"]) == (503, "Loading model")
        assert post(loading, "/v1/completions", prompt="A").status_code == 503
        loading.service.start(engine)
        assert loading.client.get("/health").status_code == 200
        loading.service.is_draining = True
        assert post(loading, "/v1/completions", prompt="A").headers["retry-after"] == "1"


def test_an_engine_that_fails_in_a_stream() -> None:
    with models.Engine(models.load("demo"), max_rows=1, warm_up=False) as engine:
        with serving(engine) as server:
            body = {"prompt": "A", "max_tokens": 500, "ignore_eos": True, "stream": True}
            with server.client.stream("POST", "/v1/completions", json=body) as response:
                events = response.iter_lines()
                assert next(events).startswith("data: {")
                engine.close()
                rest = [line for line in events if line]
            assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] is None
            assert server.client.get("/health").status_code == 503
            assert server.service.places.taken == 0


def test_control_tokens_in_short_answers(engine: models.Engine, server: Running) -> None:
    """Marks of control tokens, by which stop strings find them, are no part of a text."""
    tokenizer = engine.model.tokenizer
    assert tokenizer is not None
    end = tokenizer.eos_token_ids[0]
    body = {"prompt": "x", "max_tokens": 4, "min_tokens": 4, "ignore_eos": True}
    body |= {"stop": ["</s>"], "logit_bias": {str(end): 1000}}
    for stream in (False, True):
        found = post(server, "/v1/completions", **body, stream=stream)
        assert found.status_code == 200 and "error" not in found.text


def test_whoever_asks_for_health_takes_no_place(engine: models.Engine, server: Running) -> None:
    server.service.places.take(8)
    try:
        found = [server.client.get("/health?generate=1").status_code for _ in range(3)]
    finally:
        server.service.places.give_back(8)
    assert found == [200] * 3


def test_templates_that_cannot_be_rendered_in_time(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process, or no turn before the time is over: 503. Other work goes on meanwhile."""
    gate, running = threading.Event(), threading.Semaphore(0)

    def slow(*_: Any, **__: Any) -> Any:
        running.release()
        assert gate.wait(60)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(transcript, "prompt_of", slow)
    limits = dataclasses.replace(server.service.settings, template_seconds=0.2)
    monkeypatch.setattr(server.service, "settings", limits)
    body = {"messages": [{"role": "user", "content": "A"}], "max_tokens": 1}
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(post, server, "/v1/chat/completions", **body) for _ in range(6)]
        for _ in range(4):
            assert running.acquire(timeout=10)
        assert post(server, "/v1/completions", prompt="A", max_tokens=1).status_code == 200
        time.sleep(0.3)
        gate.set()
        found = [answer.result() for answer in answers]
    assert {one.status_code for one in found} == {503}
    waited = ["other conversations" in one.json()["error"]["message"] for one in found]
    assert sorted(waited) == [False] * 4 + [True] * 2


def test_paths_are_exact(server: Running) -> None:
    found = post(server, "/v1/completions/", prompt="A")
    assert (found.status_code, found.json()["error"]["type"]) == (404, "not_found_error")


def test_file_defaults_that_are_wrong(engine: models.Engine, monkeypatch: Any) -> None:
    """They are ignored, as the command line does."""
    monkeypatch.setitem(engine.model.metadata, "general.sampling.temp", 500.0)
    with serving(engine) as server:
        assert post(server, "/v1/completions", prompt="A", max_tokens=1).status_code == 200
