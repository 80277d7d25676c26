"""Connections that send no request, or something else."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from jax_q4k import models
from jax_q4k.models.server import protocol

from ..engine.engine_runs import is_idle, wait_until
from .running import Running, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(None) as server:
        yield server


def answer(server: Running, *parts: bytes, pause: float = 0.0) -> bytes:
    """Sends bytes; returns all that comes until the server closes the connection."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        found = b""
        while piece := connection.recv(1 << 16):
            found += piece
    return found


@pytest.mark.parametrize(
    ("request_bytes", "status", "message"),
    [
        (b"GET /\x00 HTTP/1.1\r\n\r\n", 400, "the request is not HTTP/1.1"),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400, "the request is not HTTP/1.1"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000, 431, "the headers are too long"),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 8000, 431, "the headers are too long"),
    ],
)
def test_other_things_than_requests(
    server: Running, request_bytes: bytes, status: int, message: str
) -> None:
    head, _, body = answer(server, request_bytes).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d" % status)
    assert json.loads(body)["error"]["message"] == message


def test_headers_that_do_not_come(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closes connections without data, with half a request, and with half of a second one."""
    monkeypatch.setattr(protocol, "HEADER_SECONDS", 0.3)
    began = time.monotonic()
    assert answer(server) == b""
    assert answer(server, b"GET /health HTTP/1.1\r\n", b"Host: localhost\r\n", pause=0.1) == b""
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert answer(server, whole, b"GET /health HT", pause=0.1).count(b"HTTP/1.1 503") == 1
    assert time.monotonic() - began < 10


def test_bodies_of_answered_requests_must_come_soon(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers before the body has come; closes if the rest is slow, wrong, or missing."""
    monkeypatch.setattr(protocol, "CLOSE_SECONDS", 0.3)
    head = b"POST /version HTTP/1.1\r\nHost: localhost\r\n"
    sized, chunked = b"Content-Length: 999\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"
    for parts in ((head + sized, b"x"), (head + sized,), (head + chunked, b"ZZ\r\n")):
        began = time.monotonic()
        assert answer(server, *parts, pause=0.1).count(b"HTTP/1.1 405") == 1
        assert time.monotonic() - began < 10
    # A body that does come leaves the connection to further requests.
    body, then = (
        b"y" * 999,
        b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    )
    found = answer(server, head + sized, body, then, pause=0.1)
    assert [found.count(b"HTTP/1.1 %d" % status) for status in (405, 200)] == [1, 1]


def test_data_behind_a_request(engine: models.Engine) -> None:
    """Line ends are ignored, so that a client that leaves is noticed; a request ends the other."""
    body = json.dumps({"prompt": "A", "max_tokens": 400, "ignore_eos": True, "n": 4}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with serving(engine) as server:
        for rest in (b"\r\n", b"GET / HTTP/1.1\r\n\r\n"):
            host, _, port = server.url.removeprefix("http://").partition(":")
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                connection.sendall(request)
                wait_until(lambda: engine.stats().running > 0)
                connection.sendall(rest)
            before = engine.stats().new_tokens
            wait_until(lambda: is_idle(engine) and server.service.places.taken == 0)
            assert engine.stats().new_tokens - before < 1200
