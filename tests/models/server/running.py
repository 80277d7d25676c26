"""Servers of the demo model on a free port, for tests."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from jax_q4k import models
from jax_q4k.models.server import app
from jax_q4k.models.server.run import config_of

from ..engine.engine_runs import wait_until


class Running(NamedTuple):
    """A server.

    Attributes:
      client: HTTP client of its address.
      service: what its routes share.
      connections: open connections.
    """

    url: str
    client: httpx.Client
    service: Any
    connections: Collection[Any]


@contextlib.contextmanager
def serving(
    engine: models.Engine | None, *, below: str = "", send_buffer: int = 0, **fields: Any
) -> Iterator[Running]:
    """Serves an engine, or none that has loaded, with `fields` of Settings.

    below: path under which the application is mounted in another one. send_buffer: bytes that the
    system keeps of what a client has not read.
    """
    application = app(engine, **({"name": "demo"} | fields))
    outer = Starlette(routes=[Mount(below, application)]) if below else application
    listening = socket.create_server(("127.0.0.1", 0))
    if send_buffer:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = uvicorn.Server(config_of(outer))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=60) as client:
            connections = server.server_state.connections
            yield Running(url, client, application.state.service, connections)
    finally:
        server.should_exit = True
        thread.join()
