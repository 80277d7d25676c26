"""Serves an application with uvicorn, until a signal or the end of the engine."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from ..engine.engine import Engine
from .protocol import Protocol
from .service import Service

logger = logging.getLogger("jax_q4k.server")

#: Exit codes: ended after all answers; the engine or loading failed; ended by a second signal.
DRAINED, FAILED, KILLED = 0, 1, 130

#: Limits of connections: how many, bytes of headers, seconds of silence between requests.
_CONNECTIONS, _HEADER_BYTES, _KEEP_ALIVE = 256, 16 << 10, 30


class Server(uvicorn.Server):
    """A uvicorn server that listens first, and loads its engine meanwhile.

    On SIGTERM or Ctrl-C it takes no new requests and ends when the running ones are answered, or
    after `drain` seconds; a second signal ends it at once.
    """

    def __init__(
        self,
        app: Starlette,
        load: Callable[[], Engine],
        *,
        drain: float,
        on_ready: Callable[[Engine], object],
        on_failure: Callable[[Exception], object],
    ) -> None:
        """Prepares serving.

        load: makes the engine, in a thread. on_ready: called in that thread when requests are
        served. on_failure: called in that thread with the error that `load` raised.
        """
        super().__init__(config_of(app, timeout_graceful_shutdown=max(int(drain), 1)))
        self.service: Service = app.state.service
        self.code = DRAINED
        self._load, self._on_ready, self._on_failure = load, on_ready, on_failure
        self._loader = threading.Thread(target=self._start_engine, daemon=True)
        self._signals = 0

    def serve_until_end(self, listening: socket.socket) -> int:
        """Serves on a listening socket in the main thread; returns the exit code."""
        asyncio.run(self.serve(sockets=[listening]))
        if self.service.engine is not None:
            self.service.engine.close()
        elif self._loader.is_alive():
            os._exit(self.code)  # XLA may be compiling, and would crash while Python shuts down
        return self.code

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        self.service.is_draining = True
        if self._signals > 1:
            self.code, self.force_exit = KILLED, True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loader.start()

    async def on_tick(self, counter: int) -> bool:
        engine = self.service.engine
        if engine is not None and not engine.is_open and not self.should_exit:
            logger.error("the engine has failed")
            self.code, self.should_exit = FAILED, True
        ends: bool = await super().on_tick(counter)
        return ends

    def _start_engine(self) -> None:
        try:
            engine = self._load()
        except Exception as error:
            self._on_failure(error)
            self.code, self.should_exit = FAILED, True
            return
        self.service.start(engine)
        self._on_ready(engine)


def config_of(app: Starlette, **options: Any) -> uvicorn.Config:
    """Returns uvicorn's configuration for the application."""
    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        server_header=False,
        log_config=None,
        log_level="critical",  # its errors are the client's, or are logged by the application
        limit_concurrency=_CONNECTIONS,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        timeout_keep_alive=_KEEP_ALIVE,
        **options,
    )


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; raises OSError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)
