"""Serves an application with uvicorn, until a signal or the end of the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import uvicorn
from starlette.applications import Starlette

from ..engine.encoder_engine import EncoderEngine
from ..engine.engine import Engine
from ..runner.model import Model
from .application import app
from .protocol import MOST_CONNECTIONS, Protocol
from .service import Service
from .settings import Settings

logger = logging.getLogger("jax_q4k.server")

#: Exit codes: ended after all answers; the engine or loading failed; ended by a second signal.
DRAINED, FAILED, KILLED = 0, 1, 130

#: Limits of a connection: bytes of headers, seconds of silence between requests.
_HEADER_BYTES, _KEEP_ALIVE = 16 << 10, 30
#: Seconds that answers may take to end after the engine has ended.
_GRACE = 5
#: Files that the process should be able to open.
_FILES = 2 * MOST_CONNECTIONS


class Server(uvicorn.Server):
    """A uvicorn server that listens first, and loads its engine meanwhile.

    On SIGTERM or Ctrl-C it takes no new requests and ends when the running ones are answered, or
    after `drain` seconds; a second signal ends it at once.
    """

    def __init__(
        self,
        application: Starlette,
        load: Callable[[], Engine | EncoderEngine],
        *,
        drain: float,
        on_ready: Callable[[Engine | EncoderEngine], object],
        on_failure: Callable[[Exception], object],
    ) -> None:
        """Prepares serving.

        load: makes the engine, in a thread. on_ready: called in that thread when requests are
        served. on_failure: called in that thread with the error that `load` raised.
        """
        # The engine ends first, so that unfinished answers end with an error.
        grace = int(drain) + _GRACE
        super().__init__(config_of(application, timeout_graceful_shutdown=grace))
        self.service: Service = application.state.service
        self.code = DRAINED
        self._load, self._on_ready, self._on_failure = load, on_ready, on_failure
        self._drain, self._end = drain, threading.Event()
        self._loader = threading.Thread(target=self._start_engine, daemon=True)
        self._signals = 0

    def serve_until_end(self, listening: socket.socket) -> int:
        """Serves on a listening socket in the main thread; returns the exit code."""
        _allow_files(_FILES)
        asyncio.run(self.serve(sockets=[listening]))
        self._end.set()
        if self.service.engine is not None:
            self.service.engine.close()
            self._loader.join()
        elif self._loader.is_alive():
            os._exit(self.code)  # XLA may be compiling, and would crash while Python shuts down
        return self.code

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            self.code, self.force_exit = KILLED, True
        elif self.service.engine is not None:
            threading.Thread(target=self._close_engine, daemon=True).start()
        self.service.is_draining = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loader.start()

    async def on_tick(self, counter: int) -> bool:
        engine = self.service.engine
        is_serving = not self.service.is_draining
        if engine is not None and not engine.is_open and is_serving and self.code == DRAINED:
            logger.error("the engine has failed: %s", engine.failure)
            self.code, self.should_exit = FAILED, True
        ends: bool = await super().on_tick(counter)
        return ends

    def _close_engine(self) -> None:
        """Closes the engine when the time to drain is over."""
        if not self._end.wait(self._drain) and self.service.engine is not None:
            self.service.engine.close()

    def _start_engine(self) -> None:
        engine = None
        try:
            engine = self._load()
            self.service.start(engine)
            if engine.is_open:
                self._on_ready(engine)
        except Exception as error:
            self._on_failure(error)
            self.code, self.should_exit = FAILED, True
            if engine is not None:
                engine.close()


def _allow_files(count: int) -> None:
    """Raises the process' limit of open files, each connection being one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def config_of(application: Starlette, **options: Any) -> uvicorn.Config:
    """Returns uvicorn's configuration for the application."""
    return uvicorn.Config(
        application,
        http=Protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        server_header=False,
        log_config=None,
        log_level="critical",  # its errors are the client's, or are logged by the application
        h11_max_incomplete_event_size=_HEADER_BYTES,
        timeout_keep_alive=_KEEP_ALIVE,
        **options,
    )


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; raises OSError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


def described(engine: Engine | EncoderEngine, name: str, host: str, port: int) -> list[str]:
    """Returns lines that say what is served where, and an example."""
    stats = engine.stats()
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    if isinstance(engine, EncoderEngine):
        what = "embeddings and rankings" if engine.model.has_head else "embeddings"
        return [
            f"{name} at {url}: {what}, context {stats.max_context}",
            f"curl {url}/v1/embeddings -H 'Content-Type: application/json' "
            f"-d '{json.dumps({'input': 'Hello'})}'",
        ]
    adapters = f", adapters: {', '.join(engine.adapters)}" if engine.adapters else ""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32})
    return [
        f"{name} at {url}: context {stats.max_context}, {stats.max_rows} rows, "
        f"{stats.pages} pages of {stats.page_tokens} tokens{adapters}",
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
    ]


def _engine_of(model: Model | Engine | EncoderEngine) -> Engine | EncoderEngine:
    if not isinstance(model, Model):
        return model
    if model.config.kind.bidirectional:
        return EncoderEngine(model)
    return Engine(model, constraints=True)


def serve(
    model: Model | Engine | EncoderEngine,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    drain: float = 30.0,
    open: bool = False,
    settings: Settings | None = None,
    **fields: Any,
) -> int:
    """Serves a model over HTTP until SIGTERM or Ctrl-C, like `jax-q4k serve`.

    Prints the address when requests are served. The logger `jax_q4k.server` logs all requests. If
    the model is on devices of several processes, all of them call this with the same arguments:
    process 0 serves, and the others return when it does.

    Args:
      model: a model, for which an Engine is made, or an engine with options of its own. The engine
        is closed at the end.
      host, port: address; port 0 takes a free one.
      drain: seconds that running requests may take at the end.
      open: serve other machines without a key, too.
      settings, fields: of `jax_q4k.models.server.app`.

    Returns 0, or 130 after a second signal.

    Raises:
      ValueError: `host` is reached by other machines, and there is neither a key nor `open`.
      OSError: the address cannot be had.
      RuntimeError: the engine failed, here or in process 0. Other errors: an engine could not be
        made.
    """
    settings = dataclasses.replace(settings or Settings(), **fields).serving_at(host, open=open)
    served = model if isinstance(model, Model) else model.model
    if served.spans_processes and jax.process_index():
        with _engine_of(model):
            return DRAINED
    listening, errors = listen(host, port), list[Exception]()
    port = listening.getsockname()[1]

    def load() -> Engine | EncoderEngine:
        return _engine_of(model)

    def say(engine: Engine | EncoderEngine) -> None:
        lines = described(engine, settings.name, host, port)
        print(*lines, sep="\n", file=sys.stderr)

    server = Server(app(None, settings), load, drain=drain, on_ready=say, on_failure=errors.append)
    code = server.serve_until_end(listening)
    if errors:
        raise errors[0]
    if code == FAILED:
        failure = None if server.service.engine is None else server.service.engine.failure
        raise RuntimeError("the engine has failed") from failure
    return code
