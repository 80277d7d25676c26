"""Serve replicas of a model with Ray Serve: autoscaling, routing by prefix, rolling restarts.

    pip install '.[serve]' 'ray[serve]>=2.60'
    python examples/ray_serve.py MODEL.gguf --replicas 8     # on each of 8 GPUs; 2-8 autoscales

Every replica has an engine of its own. A conversation goes to the replica that has its earlier
turns in its prefix cache, unless others are much less busy. SIGHUP loads the model file again, one
replica after the other; the running requests are answered before their replica ends. SIGTERM or
Ctrl-C ends everything when they are answered, a second one at once.

With `--address auto` the replicas use all machines of a Ray cluster (`ray start`), at each of which
the model's file has the same path.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import ray
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import RequestRouter
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route

from jax_q4k import models
from jax_q4k.models.cli.cache import programs
from jax_q4k.models.cli.commands.serve import name_of
from jax_q4k.models.server import PrefixRoutes, Settings, app, prompt_beginnings

APPLICATION, REPLICA = "jax-q4k", "Replica"

#: Requests that wait in a front while no replica has room for them; further ones get status 429.
WAITING = 256
#: Requests of all routes that a replica takes beyond those that run or wait in its engine.
OTHERS = 16
#: Keys of an ASGI scope that can be sent to another process.
SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)


@serve.deployment(name=REPLICA)
class Replica:
    """One engine, and the application that serves it."""

    def __init__(self, options: argparse.Namespace, settings: Settings) -> None:
        mesh = None
        if options.devices > 1:
            devices = jax.devices()[: options.devices]
            mesh = jax.make_mesh((len(devices),), ("tp",), devices=devices)
        model = models.load(options.model, mesh=mesh)
        self.cache = programs(Console(stderr=True))  # of `jax-q4k`, so that restarts are fast
        model.program_cache = self.cache.__enter__()
        self.engine = models.Engine(
            model,
            max_rows=options.rows,
            pages=options.pages,
            max_context=options.context,
            cache_dtype=options.cache_dtype,
            constraints=True,
        )
        self.application = app(self.engine, settings)
        self.name = serve.get_replica_context().replica_id.unique_id

    def check_health(self) -> None:
        """Raises RuntimeError if the engine has failed: Ray then replaces the replica."""
        if not self.engine.is_open:
            raise RuntimeError("the engine has failed")

    async def respond(
        self, scope: dict[str, Any], body: bytes, beginnings: list[bytes]
    ) -> AsyncIterator[list[Any]]:
        """Yields the ASGI messages of a response as they come.

        If its caller leaves, the application is cancelled, which frees the request's row and pages.
        beginnings: of the prompt; the router reads them.
        """
        messages: asyncio.Queue[Any] = asyncio.Queue()
        requests = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            for request in requests:
                return request
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
                headers.append((b"jax-q4k-replica", self.name.encode()))
                message = {**message, "headers": headers}  # Ray adds the id of the request
            messages.put_nowait(message)

        running = asyncio.ensure_future(self.application(scope, receive, send))
        running.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            is_at_end = False
            while not is_at_end:
                news = [await messages.get()]
                while not messages.empty():
                    news.append(messages.get_nowait())
                is_at_end = news[-1] is None
                yield news[:-1] if is_at_end else news
            await running
        finally:
            running.cancel()

    async def answer(self, scope: dict[str, Any]) -> tuple[str, list[Any]]:
        """Returns the replica's name, and all ASGI messages of a response."""
        messages = [one async for news in self.respond(scope, b"", []) for one in news]
        return self.name, messages

    def __del__(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that has the beginning of its prompt, unless it is busy."""

    def initialize_state(self, slack: int) -> None:
        self.routes, self.running = PrefixRoutes(slack), Counter[Any]()

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        """Returns the replicas in the order in which to try them."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self.running[one.replica_id] for name, one in by_name.items()}
        found = self._beginnings(pending_request) or [random.randbytes(8)]
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if all are full
        return [[by_name[name]] for name in self.routes.ranked(loads, found)]

    def on_send_request(self, replica_id: Any) -> None:
        super().on_send_request(replica_id)
        self.running[replica_id] += 1

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self.running[replica_id] -= 1

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        self.routes.sent(self._beginnings(pending_request), replica_id.unique_id)

    def _beginnings(self, pending_request: Any) -> list[bytes]:
        return [] if pending_request is None else pending_request.kwargs["beginnings"]


class Front:
    """ASGI application that takes requests and passes on what a replica answers."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.all = serve.get_deployment_handle(REPLICA, APPLICATION)
        self.replicas = self.all.options(stream=True)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            async with asyncio.timeout(self.settings.body_seconds):
                body = await self._body(Request(scope, receive))
        except ClientDisconnect:
            return
        except TimeoutError:
            await refusal(408, "the body takes too long")(scope, receive, send)
            return
        found = prompt_beginnings(body)
        response = self.replicas.respond.remote(_sent(scope), body, beginnings=found)
        try:
            async for messages in response:
                for message in messages:
                    await send(message)
        except BackPressureError:
            await refusal(429, "all replicas are full; try again later")(scope, receive, send)
        finally:
            response.cancel()  # frees the request of a client that left

    async def metrics(self, request: Request) -> Response:
        """Returns the metrics of all replicas, with the label `replica`."""
        families: dict[str, Metric] = {}
        answers = await self.all.broadcast("answer", _sent(request.scope)).results_async()
        for replica, (start, *rest) in answers:
            text = b"".join(message["body"] for message in rest).decode()
            if start["status"] != 200:
                return Response(text, start["status"], media_type="application/json")
            for one in text_string_to_metric_families(text):
                known = Metric(one.name, one.documentation, one.type)
                family = families.setdefault(one.name, known)
                for sample in one.samples:
                    family.add_sample(
                        sample.name, {**sample.labels, "replica": replica}, sample.value
                    )
        return PlainTextResponse(generate_latest(SimpleNamespace(collect=families.values)))

    async def _body(self, request: Request) -> bytes:
        """Returns a request's body, or so much of it that the replica refuses it as too large."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self.settings.body_bytes:
                break
        return bytes(body)


def _sent(scope: Any) -> dict[str, Any]:
    """Returns the part of an ASGI scope that a replica's application reads."""
    return {name: scope[name] for name in SCOPE if name in scope}


def refusal(status: int, message: str) -> JSONResponse:
    error = {"message": message, "type": "unavailable_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers={"retry-after": "1"})


def front() -> Starlette:
    """Returns the application of a front, in the process where it runs."""
    found = Front()
    return Starlette(routes=[Route("/metrics", found.metrics), Mount("/", found)])


def application(options: argparse.Namespace, settings: Settings) -> serve.Application:
    """Returns the deployments: fronts, which take the requests, and replicas."""
    at_least, at_most = options.replicas
    count: dict[str, Any] = {"num_replicas": at_least}
    if at_least < at_most:
        scaling = {"min_replicas": at_least, "max_replicas": at_most}
        count = {"autoscaling_config": {**scaling, "target_ongoing_requests": options.rows}}
    on_gpu = ray.cluster_resources().get("GPU", 0) > 0
    ends = {"graceful_shutdown_timeout_s": options.drain, "graceful_shutdown_wait_loop_s": 0.5}
    replicas = Replica.options(
        **count,
        **ends,
        ray_actor_options={"num_gpus": options.devices} if on_gpu else {"num_cpus": options.cpus},
        max_ongoing_requests=options.rows + settings.queue + OTHERS,
        max_queued_requests=WAITING,
        max_surge_percent=1 if options.surge else 0,  # rounded up to a replica
        health_check_period_s=5,
        health_check_timeout_s=30,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"slack": max(1, options.rows // 4)},
        ),
    )
    fronts = serve.deployment(
        serve.ingress(front)(),
        name="Front",
        num_replicas=options.fronts,
        **ends,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=4096,
        max_surge_percent=1,  # a new front starts before an old one ends
    )
    return fronts.bind(replicas.bind(options, settings))


def end() -> None:
    """Refuses new requests, and waits until the running ones are answered."""
    serve.delete(APPLICATION, _blocking=False)
    while APPLICATION in serve.status().applications:
        time.sleep(0.2)


def main() -> int:
    options = parser().parse_args()
    lines = Path(options.api_key_file).read_text().split() if options.api_key_file else ()
    name = options.name or name_of(options.model)
    settings = Settings(name=name, api_keys=tuple(lines), seconds=options.timeout)
    settings = settings.serving_at(options.host)
    own: dict[str, Any] = {}
    if options.address == "local":
        small = {"include_dashboard": False, "object_store_memory": 256 << 20}
        own = {**small, "_node_ip_address": "127.0.0.1"}
    ray.init(options.address, log_to_driver=options.verbose, **own)
    code = run(options, settings)
    ray.shutdown()
    return code


def run(options: argparse.Namespace, settings: Settings) -> int:
    """Serves until a signal; returns the exit code."""
    restart, code = threading.Event(), 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, lambda *_: restart.set())
    try:
        serve.start(http_options={"host": options.host, "port": options.port})
        serve.run(application(options, settings), name=APPLICATION)
        while True:
            print(f"{settings.name} at http://{options.host}:{options.port}", flush=True)
            restart.wait()
            restart.clear()
            try:
                serve.run(application(options, settings), name=APPLICATION)
            except RuntimeError as error:  # the replicas that are left serve on
                print(f"restart: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("ends when the running requests are answered", file=sys.stderr, flush=True)
        try:
            end()
        except KeyboardInterrupt:
            return 130
    except RuntimeError as error:
        print(error, file=sys.stderr)
        code = 1
    serve.shutdown()
    return code


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("model", metavar="MODEL", help="GGUF file, or demo")
    found.add_argument("--replicas", type=bounds, default=(1, 1), metavar="N | MIN-MAX")
    found.add_argument("--devices", type=int, default=1, metavar="N", help="GPUs of a replica")
    found.add_argument("--cpus", type=int, default=1, metavar="N", help="of a replica without GPU")
    found.add_argument("--fronts", type=int, default=1, metavar="N", help="processes before them")
    found.add_argument(
        "--surge",
        action="store_true",
        help="at a restart, start a new replica before an old one ends: needs a GPU to spare",
    )
    found.add_argument("--rows", type=int, default=16, metavar="N", help="run in a replica; 16")
    found.add_argument("--pages", type=int, metavar="N", help="pages of 16 tokens of a replica")
    found.add_argument("--context", type=int, metavar="N", help="most tokens of a request")
    found.add_argument("--cache-dtype", default="float32", metavar="DTYPE", help="of the pages")
    found.add_argument("--host", default="127.0.0.1", help="others need a key")
    found.add_argument("--port", type=int, default=8080)
    found.add_argument("--name", help="the model's id; default: the file's name")
    found.add_argument("--api-key-file", metavar="FILE", help="file with a key in each line")
    found.add_argument("--timeout", type=float, default=600, metavar="S", help="of a request; 600")
    found.add_argument(
        "--drain",
        type=float,
        default=630,
        metavar="S",
        help="time that a replica has to answer its requests before it ends; more than --timeout",
    )
    found.add_argument("--address", default="local", help="of a Ray cluster; local starts one")
    found.add_argument("--verbose", action="store_true", help="print the logs of all processes")
    return found


def bounds(text: str) -> tuple[int, int]:
    """Parses a number of replicas, or the least and the most."""
    least, _, most = text.partition("-")
    found = int(least), int(most or least)
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, or MIN-MAX")
    return found


if __name__ == "__main__":
    sys.exit(main())
