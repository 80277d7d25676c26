"""Serves an application with uvicorn, until a signal or the end of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette

from ..engine.engine import Engine
from .service import Service

logger = logging.getLogger("jax_q4k.server")

#: Exit codes: ended by a signal after all answers; the engine failed; a second signal.
DRAINED, FAILED, KILLED = 0, 1, 130

#: Limits of connections: how many, header bytes, seconds of silence.
_CONNECTIONS, _HEADER_BYTES, _KEEP_ALIVE = 256, 16 << 10, 30

_LOOK_SECONDS = 0.2  # how often the engine's state is read


class Server(uvicorn.Server):
    """A uvicorn server that loads an engine after it has begun to listen.

    On SIGTERM or SIGINT it refuses new requests and ends when the running ones are answered, or
    after `drain` seconds; a second signal ends it at once.
    """

    def __init__(
        self, app: Starlette, load: Callable[[], Engine], *, drain: float, **options: Any
    ) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            access_log=False,
            server_header=False,
            log_config=None,
            limit_concurrency=_CONNECTIONS,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=int(drain),
            **options,
        )
        super().__init__(config)
        self.service: Service = app.state.service
        self._load, self._drain = load, drain
        self.code = DRAINED
        self._signals = 0

    def serve_until_end(self, listening: socket.socket) -> int:
        """Serves on a listening socket; returns the exit code."""
        asyncio.run(self._serve(listening))
        return self.code

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals in the event loop instead of uvicorn's way, which raises them again."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        self._signals += 1
        self.service.is_draining = True
        if self._signals > 1:
            self.code, self.force_exit = KILLED, True
        self.should_exit = True

    async def _serve(self, listening: socket.socket) -> None:
        watching = asyncio.create_task(self._watch())
        try:
            await self.serve(sockets=[listening])
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self) -> None:
        """Loads the engine, then ends the server if the engine fails."""
        try:
            engine = await asyncio.to_thread(self._load)
            self.service.start(engine)
            while engine.is_open:
                await asyncio.sleep(_LOOK_SECONDS)
            logger.error("the engine has failed")
        except Exception:
            logger.exception("the model could not be loaded")
        self.code, self.should_exit = FAILED, True


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; raises OSError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(128)
    except BaseException:
        found.close()
        raise
    return found
