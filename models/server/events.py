"""Server-sent events: a response that writes them as they come."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect

from .answers import Answers, while_connected
from .errors import ApiError, late

logger = logging.getLogger("jax_q4k.server")

DONE, PING = b"data: [DONE]\n\n", b": ping\n\n"


def event(data: Any, name: str | None = None) -> bytes:
    """Returns an event with `data` as JSON, and a name."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Returns an event `{"error": ...}`."""
    return event(error.body)


class EventStream:
    """ASGI response that sends events until they end or the client leaves.

    It closes `answers` then. After an error, the last event is that of the error.
    """

    def __init__(
        self,
        answers: Answers,
        events: AsyncIterator[bytes],
        *,
        seconds: float | None,
        headers: dict[str, str],
        error_event: Callable[[ApiError], bytes],
    ) -> None:
        self._answers, self._events, self._error_event = answers, events, error_event
        self._seconds, self._headers = seconds, headers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await while_connected(receive, self._sent(send))
        except ClientDisconnect:
            pass  # nobody reads what could be said
        finally:
            self._answers.close()

    async def _sent(self, send: Any) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **self._headers,
        }
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": pairs})
        try:
            async with asyncio.timeout(self._seconds):
                async for one in self._events:
                    await send(_part(one))
        except TimeoutError:
            await self._fail(send, late(self._seconds))
        except ApiError as error:
            await self._fail(send, error)
        except Exception:
            logger.exception("a stream failed")
            await self._fail(send, ApiError(500, "internal error"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fail(self, send: Any, error: ApiError) -> None:
        self._answers.rejected(error)
        self._answers.close()
        await send(_part(self._error_event(error)))


def _part(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}
