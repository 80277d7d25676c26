"""Hosts, origins and keys: who may send requests, and who reads the answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jax_q4k.models.server import Settings

from .running import Running, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Returns a server without a model; a request that is let through finds it loading."""
    origins = ("https://app.example",)
    with serving(None, api_keys=("one", "two"), cors_origins=origins) as server:
        yield server


def status(server: Running, path: str = "/v1/models", **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return int(server.client.get(path, headers=named).status_code)


@pytest.mark.parametrize(
    ("headers", "want"),
    [
        ({}, 401),
        ({"authorization": "Bearer three"}, 401),
        ({"authorization": "Bearer one"}, 200),
        ({"x_api_key": "two"}, 200),
        ({"authorization": "Bearer ünïcode"}, 401),
        ({"authorization": "Bearer one", "host": "evil.example"}, 403),
        ({"authorization": "Bearer one", "host": "localhost:1"}, 200),
        ({"authorization": "Bearer one", "origin": "https://evil.example"}, 403),
        ({"authorization": "Bearer one", "origin": "null"}, 403),
        ({"authorization": "Bearer one", "origin": "https://app.example"}, 200),
    ],
)
def test_who_is_served(server: Running, headers: dict[str, Any], want: int) -> None:
    encoded = {name: value.encode() for name, value in headers.items()}
    assert status(server, **encoded) == want


def test_errors_have_the_form_of_the_routes_api(server: Running) -> None:
    assert server.client.get("/v1/models").json()["error"]["code"] == "invalid_api_key"
    found = server.client.post("/v1/messages", json={}).json()
    assert found["type"] == "error" and found["error"]["type"] == "authentication_error"


def test_its_own_pages(server: Running) -> None:
    assert status(server, authorization="Bearer one", origin=server.url) == 200


def test_health_needs_no_key(server: Running) -> None:
    assert status(server, "/health") == 503


def test_other_origins_may_read_if_they_are_allowed(server: Running) -> None:
    asks = {"origin": "https://app.example", "access-control-request-method": "POST"}
    found = server.client.options("/v1/completions", headers=asks)
    assert found.status_code == 204
    assert found.headers["access-control-allow-origin"] == "https://app.example"
    asks["access-control-request-headers"] = "authorization, x-stainless-lang"
    found = server.client.options("/v1/completions", headers=asks)
    assert found.headers["access-control-allow-headers"] == "authorization, x-stainless-lang"
    assert "access-control-allow-origin" not in server.client.get("/health").headers
    other = {**asks, "origin": "https://evil.example"}
    assert server.client.options("/v1/completions", headers=other).status_code == 403


def test_refusals_are_counted() -> None:
    with serving(None, api_keys=("one",)) as server:
        status(server)
        status(server, host="evil.example")
        status(server, "/health")
        found = server.client.get("/metrics", headers={"authorization": "Bearer one"}).text
    lines = found.splitlines()
    counts = [line.split() for line in lines if line.startswith("jax_q4k:requests_rejected_total")]
    assert {name.split('"')[1]: float(count) for name, count in counts} == {
        "queue_full": 0,
        "invalid_api_key": 1,
        "wrong_host": 1,
    }


def test_request_ids(server: Running) -> None:
    given = server.client.get("/health", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    strange = server.client.get("/health", headers={"x-request-id": "a b"})
    assert strange.headers["x-request-id"] not in ("a b", "abc-1")


def test_a_local_name_is_needed_even_without_keys() -> None:
    with serving(None) as server:
        assert status(server) == 200
        assert status(server, host="rebound.example") == 403
    with serving(None, allowed_hosts=("*",)) as server:
        assert status(server, host="rebound.example") == 200


def test_too_many_requests() -> None:
    """Requests beyond the limit get 429; the health of the server is still told."""
    with serving(None, requests=0) as server:
        refused = server.client.get("/version")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "too_many_requests"
        assert server.client.get("/health").status_code == 503  # it is loading


@pytest.mark.parametrize("origin", ["http://[", "http://]", "null", "x", "http://[zz]"])
def test_strange_origins(origin: str) -> None:
    with serving(None, allowed_hosts=("*",)) as server:
        headers = {"origin": origin, "host": ""}
        assert server.client.get("/health", headers=headers).status_code == 403


def test_schemes_of_keys_and_types_of_bodies_have_any_case() -> None:
    with serving(None, api_keys=("secret",)) as server:
        for scheme in ("bearer", "BEARER"):
            headers = {"authorization": f"{scheme} secret", "content-type": "Application/JSON"}
            found = server.client.post("/tokenize", headers=headers, content="{")
            assert found.status_code == 400  # the body is not JSON
        for wrong in ("Basic secret", "secret", "Bearer"):
            found = server.client.get("/version", headers={"authorization": wrong})
            assert found.status_code == 401
        assert server.client.get("/health?generate=1").status_code == 401


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"api_keys": "secret"}, "api_keys is a text"),
        ({"api_keys": ("",)}, "a key must have ASCII characters"),
        ({"seconds": float("nan")}, "seconds=nan must be above 0"),
        ({"queue": -1}, "queue=-1 must be at least 0"),
        ({"template_variables": {"messages": []}}, "template_variables may not have messages"),
    ],
)
def test_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Settings(**fields)


def test_an_ipv6_host() -> None:
    assert "[2001:db8::5]" in Settings().serving_at("2001:db8::5", open=True).allowed_hosts


def test_errors_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the form of others, with a request id and the headers for other origins."""

    def fails() -> None:
        raise RuntimeError("planted")

    with serving(None, cors_origins=("http://page",)) as server:
        monkeypatch.setattr(server.service, "ready", fails)
        found = server.client.get("/health", headers={"origin": "http://page"})
    assert (found.status_code, found.json()["error"]["message"]) == (500, "internal error")
    assert found.headers["access-control-allow-origin"] == "http://page"
    assert found.headers["x-request-id"]
