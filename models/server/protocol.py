"""HTTP/1.1 for uvicorn, with a time limit of headers and errors that say what is wrong."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from .errors import ApiError

#: Seconds in which a request's headers must come.
HEADER_SECONDS = 20.0
#: Seconds in which a peer must read what was sent before the connection was closed, or send the
#: rest of a body whose request was answered already.
CLOSE_SECONDS = 10.0
#: Open connections, beyond which new ones are closed at once.
MOST_CONNECTIONS = 4096


class _Transport:
    """A transport that does not wait forever, when it closes, for a peer that reads nothing."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._loop.call_later(CLOSE_SECONDS, self._transport.abort)


class Protocol(H11Protocol):
    """uvicorn's protocol, which closes connections whose headers do not come, or that are too many.

    A request that is not HTTP gets status 400, one with too long headers 431.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Transport(transport, self.loop))  # type: ignore[arg-type]
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Ends the request; of one that is answered early, the rest of the body must come soon."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self.loop.call_later(CLOSE_SECONDS, self._end_body, self.cycle)

    def _end_body(self, cycle: object) -> None:
        if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Takes data; none of a further request while one is being answered."""
        if self.conn.their_state is h11.DONE:
            if data.strip(b"\r\n"):  # h11 would read nothing more, not even that the client left
                self.transport.close()
            return
        if self._timer is None and self.conn.their_state is h11.IDLE:
            self._await_headers()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        """Answers a request that h11 has refused; called while its error is handled."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # it has an answer already
            return
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        message = "the headers are too long" if status == 431 else "the request is not HTTP/1.1"
        body = msgspec.json.encode(ApiError(status, message).body)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        parts = (
            h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        for part in parts:
            self.transport.write(self.conn.send(part))
        self.transport.close()

    def _await_headers(self) -> None:
        self._timer = self.loop.call_later(HEADER_SECONDS, self._end)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()
