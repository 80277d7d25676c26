"""Checks that precede every route: host, origin, key; request ids and the log of requests."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response

from .errors import ApiError, own_path
from .settings import Settings

logger = logging.getLogger("jax_q4k.server")

#: Paths below the mount point that need no key, and are served while others are too many; they say
#: nothing of anybody's requests.
_OPEN_PATHS = ("/health", "/v1/health", "/")

_METHODS = "GET, POST, OPTIONS"
_EXPOSED = "jax-q4k-ignored, jax-q4k-seed, retry-after, x-request-id"


class _Stalled(BaseException):
    """The client reads nothing. Not an Exception, so that nothing tries to answer it."""


class Guard:
    """ASGI middleware that refuses requests from elsewhere, and logs all of them.

    It ends responses that their client does not read.

    A web page can make a browser send requests to this machine: with a name that resolves to it,
    which the Host header shows, or from another origin, which the Origin header shows.
    """

    def __init__(self, app: Any, settings: Settings, rejected: Callable[[str], object]) -> None:
        """Wraps an application; `rejected` is called with the code of each refusal."""
        self._app, self._settings, self._rejected = app, settings, rejected
        self._running = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, began = Headers(scope=scope), time.monotonic()
        request_id = _request_id(headers.get("x-request-id"))
        status = 0

        async def answer(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = {"x-request-id": request_id} | self._cors(headers)
                pairs = [(name.encode(), value.encode("latin-1")) for name, value in more.items()]
                message = {**message, "headers": [*message["headers"], *pairs]}
            try:
                async with asyncio.timeout(self._settings.stalled_seconds):
                    await send(message)
            except TimeoutError:
                raise _Stalled from None

        self._running += 1
        try:
            problem = self._problem(scope, headers)
            if problem is not None:
                self._rejected(problem.code or str(problem.status))
                await problem.response(scope)(scope, receive, answer)
            elif scope["method"] == "OPTIONS" and "origin" in headers:
                await Response(status_code=204)(scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
        except Exception:
            logger.exception("a request failed", extra={"request_id": request_id})
            if status:
                raise  # the response has begun; the server closes the connection
            await ApiError(500, "internal error").response(scope)(scope, receive, answer)
        except _Stalled:
            logger.info("a client reads nothing: dropped", extra={"request_id": request_id})
        finally:
            self._running -= 1
            milliseconds = 1e3 * (time.monotonic() - began)
            logger.info(
                "%s %s %d %.0f ms",
                scope["method"],
                _printable(scope["path"]),
                status,
                milliseconds,
                extra={"request_id": request_id, "status": status},
            )

    def _problem(self, scope: Any, headers: Headers) -> ApiError | None:
        """Returns why the request is refused; None if it is not."""
        settings = self._settings
        is_open = own_path(scope) in _OPEN_PATHS and b"generate" not in scope["query_string"]
        if self._running > settings.requests and not is_open:
            again = {"retry-after": "1", "connection": "close"}
            problem = f"{settings.requests} requests are running; try again later"
            return ApiError(429, problem, code="too_many_requests", headers=again)
        if not _is_allowed(_host_of(headers.get("host", "")), settings.allowed_hosts):
            return ApiError(403, "the Host header names another machine", code="wrong_host")
        origin = headers.get("origin")
        if origin is not None and not self._is_own(origin, headers.get("host", "")):
            return ApiError(403, "requests of other origins are refused", code="wrong_origin")
        is_preflight = scope["method"] == "OPTIONS" and origin is not None
        if settings.api_keys and not is_open and not is_preflight:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            given = given.strip() if scheme.lower() == "bearer" else ""
            given = given or headers.get("x-api-key", "")
            raw = given.encode("latin-1")  # the bytes that came
            found = [hmac.compare_digest(raw, key.encode()) for key in settings.api_keys]
            if not any(found):
                message = "the API key is wrong" if given else "an API key is needed"
                challenge = {"www-authenticate": "Bearer"}
                return ApiError(401, message, code="invalid_api_key", headers=challenge)
        return None

    def _is_own(self, origin: str, host: str) -> bool:
        """Returns whether an origin is this server's own, or an allowed one."""
        if _is_allowed(origin, self._settings.cors_origins):
            return True
        return bool(host) and origin.partition("://")[2] == host

    def _cors(self, headers: Headers) -> dict[str, str]:
        origin = headers.get("origin")
        if origin is None or not _is_allowed(origin, self._settings.cors_origins):
            return {}
        return {
            "access-control-allow-origin": origin,
            "access-control-allow-methods": _METHODS,
            # Official clients in a browser send headers of their own.
            "access-control-allow-headers": headers.get("access-control-request-headers", "*"),
            "access-control-expose-headers": _EXPOSED,
            "access-control-max-age": "600",
            "vary": "origin, access-control-request-headers",
        }


def _is_allowed(value: str, allowed: tuple[str, ...]) -> bool:
    return "*" in allowed or value.lower() in {one.lower() for one in allowed}


def _host_of(header: str) -> str:
    """Returns a Host header without the port."""
    return re.sub(r":\d*$", "", header)


def _request_id(given: str | None) -> str:
    """Returns the client's id of a request if it is harmless, else a new one."""
    if given is not None and re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII):
        return given
    return secrets.token_hex(8)


def _printable(text: str) -> str:
    return text.encode("unicode_escape").decode()[:200]
