"""GET /health, /metrics, /v1/models and /version."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

import jax_q4k

from ..engine.engine import Engine
from ..engine.request import Changes, Reader
from ..sampling import Sampling
from .answers import failures
from .errors import ApiError, json_response, unavailable
from .service import Service

#: Seconds that a token of /health?generate=1 may take.
_HEALTH_SECONDS = 30.0


async def health(request: Request) -> Response:
    """Says whether requests are served; `?generate=1` generates a token."""
    service: Service = request.app.state.service
    service.ready()
    if request.query_params.get("generate") in ("1", "true"):
        if service.probe is None or service.probe.done():
            service.probe = asyncio.ensure_future(_probe(service.generator()))
        await asyncio.shield(service.probe)  # which others may await, too
    return json_response({"status": "ok"})


async def _probe(engine: Engine) -> None:
    """Generates a token, before those of other requests; raises ApiError."""
    sampling = Sampling(max_new_tokens=1, ignore_end=True)
    with failures():
        request = engine.submit([0], sampling, priority=-(2**31))
        with Changes([request]) as changes:
            await changes.until(Reader(request).is_at_end, ends=True, seconds=_HEALTH_SECONDS)
        request.cancel()
        if not request.result(0).tokens:
            raise unavailable(f"no token within {_HEALTH_SECONDS:g} s")


async def models(request: Request) -> Response:
    """Lists the model and its LoRA adapters."""
    service: Service = request.app.state.service
    adapters = [_adapter(service, name) for name in service.adapters]
    return json_response({"object": "list", "data": [_model(service), *adapters]})


async def model(request: Request) -> Response:
    """Describes the model, or a LoRA adapter of it."""
    service: Service = request.app.state.service
    name = request.path_params["id"]
    if name in service.adapters:
        return json_response(_adapter(service, name))
    if name != service.settings.name:
        raise ApiError(404, "no such model", param="model", code="model_not_found")
    return json_response(_model(service))


async def metrics(request: Request) -> Response:
    """Returns all metrics in Prometheus' text format."""
    service: Service = request.app.state.service
    text = generate_latest(service.metrics.registry)
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def version(_: Request) -> Response:
    """Returns the version of the package."""
    return json_response({"version": jax_q4k.__version__})


def _adapter(service: Service, name: str) -> dict[str, Any]:
    own = {"id": name, "display_name": name, "parent": service.settings.name}
    return _model(service) | own


def _model(service: Service) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": service.settings.name,
        "object": "model",
        "created": service.created,
        "owned_by": "jax-q4k",
        # As Anthropic's API describes models.
        "type": "model",
        "display_name": service.settings.name,
        "created_at": datetime.datetime.fromtimestamp(service.created, datetime.UTC).isoformat(),
    }
    if service.engine is not None:
        config = service.engine.model.config
        found |= {
            "max_model_len": service.engine.stats().max_context,
            "meta": {
                "architecture": config.architecture,
                "vocab_size": config.vocab_size,
                "n_ctx_train": config.context_length,
                "size": service.engine.model.weight_bytes,
            },
        }
    return found
