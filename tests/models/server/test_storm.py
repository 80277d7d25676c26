"""Many requests of all kinds at once, of which some leave: no page, place or answer is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks import soak
from jax_q4k import models
from jax_q4k.models.server import protocol, run

from ..engine.engine_runs import is_idle, wait_until
from .running import Running, serving


@pytest.fixture(scope="module")
def engine() -> Iterator[models.Engine]:
    """Yields a deterministic engine with too few pages for its rows."""
    options = {"max_rows": 16, "max_context": 96, "pages": 14, "deterministic": True}
    with models.Engine(models.load("demo"), warm_up=False, **options) as engine:  # type: ignore[arg-type]
        yield engine


def port_of(server: Running) -> int:
    return int(server.url.rpartition(":")[2])


@pytest.mark.slow("sends hundreds of requests")
def test_storm(engine: models.Engine, record_property: Callable[[str, object], None]) -> None:
    """Sends 300 requests, or as many as the environment variable STORM_REQUESTS says.

    Answers to texts must be those that the engine gives without a server, whole and streamed.
    """
    size = int(os.environ.get("STORM_REQUESTS", 300))
    outputs = engine.generate(list(soak.PROMPTS), max_new_tokens=40, ignore_end=True)
    answers = {text: one.tokens for text, one in zip(soak.PROMPTS, outputs, strict=True)}

    def check(ask: soak.Ask, body: bytes) -> str | None:
        if (problem := soak.is_whole(ask, body)) is not None or ask.path != "/v1/completions":
            return problem
        events = body.split(b"\n\n") if ask.streams else [b"data: " + body]
        tokens: dict[int, list[int]] = {i: [] for i in range(ask.body.get("n", 1))}
        for event in events:
            if event.startswith(b"data: {"):
                for choice in json.loads(event[6:])["choices"]:
                    tokens[choice["index"]] += choice.get("token_ids", [])
        want = answers[ask.body["prompt"]][: ask.body["max_tokens"]]
        return None if all(got == want for got in tokens.values()) else f"{tokens}, not {want}"

    with serving(engine, queue=20) as server:
        found = asyncio.run(
            soak.storm(
                port_of(server),
                seed=3,
                goes_on=lambda number: number < size,
                check=check,
                further={"/v1/completions": {"return_token_ids": True}},
            )
        )
        wait_until(lambda: is_idle(engine) and server.service.places.taken == 0)
        engine.check()
    stats = engine.stats()
    assert not found.wrong, found.wrong[:5]
    assert sum(found.statuses.values()) == size and 0.2 * size < found.left < 0.4 * size
    assert found.finished > 0.3 * size and stats.free_pages == stats.pages
    assert found.statuses[400] > 0 and stats.preemptions > size // 100
    record_property(
        "figure",
        f"storm over HTTP: {size} requests, {found.left} left, statuses {dict(found.statuses)}, "
        f"{stats.preemptions} preemptions",
    )


@pytest.mark.slow("opens hundreds of connections")
def test_more_clients_than_places(engine: models.Engine) -> None:
    """All clients connect at once; each gets its answer, or 429 and when to try again."""
    count = int(os.environ.get("STORM_CONNECTIONS", 200))
    body = json.dumps({"prompt": "The sea", "max_tokens": 20, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)

    async def client(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        with contextlib.closing(writer):
            found = b""
            while piece := await reader.read(1 << 16):
                found += piece
            return found

    async def all_at_once(port: int) -> list[bytes]:
        return await asyncio.gather(*(client(port) for _ in range(count)))

    with serving(engine, queue=48) as server:
        found = asyncio.run(all_at_once(port_of(server)))
        wait_until(lambda: is_idle(engine) and server.service.places.taken == 0)
    statuses = Counter(response[9:12] for response in found)
    assert statuses.keys() == {b"200", b"429"} and statuses[b"200"] >= 64, statuses
    for response in found:
        parts, _, rest = response.partition(b"\r\n\r\n")
        answer = json.loads(rest)
        if response[9:12] == b"429":
            assert b"retry-after: 1" in parts
            assert answer["error"]["code"] in ("queue_full", "too_many_requests")
        else:
            assert answer["usage"]["completion_tokens"] == 20


@pytest.mark.slow("leaves connections unread")
@pytest.mark.parametrize("stream", [False, True])
def test_readers_that_do_not_read(
    engine: models.Engine, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """They hold up nobody, are dropped after a while, and their requests end."""
    monkeypatch.setattr(protocol, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(run, "_KEEP_ALIVE", 1)
    body = {"prompt": "The sea", "max_tokens": 60, "ignore_eos": True, "stream": stream}
    raw = json.dumps(body | {"n": 8, "logprobs": 20}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(raw)
    fields: dict[str, Any] = {"queue": 64, "stalled_seconds": 1.0, "event_seconds": 0.0}
    connections = []
    with serving(engine, send_buffer=4096, **fields) as server, contextlib.ExitStack() as stack:
        for _ in range(3):
            connections.append(stack.enter_context(socket.socket()))
            connections[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connections[-1].connect(("127.0.0.1", port_of(server)))
            connections[-1].sendall(head + raw)
        wait_until(lambda: engine.stats().running > 0)
        plain = {"prompt": "It was", "max_tokens": 5}
        assert server.client.post("/v1/completions", json=plain).status_code == 200
        wait_until(lambda: not server.connections, 60)
        wait_until(lambda: is_idle(engine) and server.service.places.taken == 0)
        ends = [end_of(connection) for connection in connections]
    assert not any(end.endswith((b"0\r\n\r\n", b"}")) for end in ends), ends


def end_of(connection: socket.socket) -> bytes:
    """Waits until the server has closed the connection; returns the end of what it had sent."""
    connection.settimeout(30)
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found[-40:]
