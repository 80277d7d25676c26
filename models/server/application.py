"""The ASGI application."""

from __future__ import annotations

import dataclasses
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ..engine.encoder_engine import EncoderEngine
from ..engine.engine import Engine
from . import (
    adapters,
    chat_completions,
    completions,
    embeddings,
    messages,
    openapi,
    page,
    rerank,
    responses,
    status,
    tokens,
)
from .errors import ApiError, own_path
from .guard import Guard
from .service import Service
from .settings import Settings

#: Beginnings of paths that are also served without /v1, or with it, as llama-server does.
_ALIASED = ("/v1/chat/", "/v1/responses", "/v1/models", "/v1/rerank", "/health")

#: Status of requests whose client left; nobody gets it, but the log has it.
CLIENT_LEFT = 499


def app(
    engine: Engine | EncoderEngine | None = None, settings: Settings | None = None, **fields: Any
) -> Starlette:
    """Returns an ASGI application that serves an engine.

    Args:
      engine: None while the model is loading; `app.state.service.start(engine)` begins to serve.
      settings: limits and names; None means the defaults.
      fields: fields of `Settings` that override `settings`.
    """
    settings = dataclasses.replace(settings or Settings(), **fields)
    service = Service(settings, engine)
    routes = [
        Route("/v1/chat/completions", chat_completions.create, methods=["POST"]),
        Route("/v1/chat/completions/input_tokens", chat_completions.count_tokens, methods=["POST"]),
        Route("/v1/completions", completions.create, methods=["POST"]),
        Route("/v1/messages", messages.create, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
        Route("/v1/responses", responses.create, methods=["POST"]),
        Route("/v1/responses/input_tokens", responses.count_tokens, methods=["POST"]),
        Route("/v1/embeddings", embeddings.create, methods=["POST"]),
        Route("/v1/rerank", rerank.create, methods=["POST"]),
        Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
        Route("/v1/models", status.models, methods=["GET"]),
        Route("/v1/models/{id:path}", status.model, methods=["GET"]),
        Route("/health", status.health, methods=["GET"]),
        Route("/metrics", status.metrics, methods=["GET"]),
        Route("/openapi.json", openapi.openapi, methods=["GET"]),
        Route("/version", status.version, methods=["GET"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/apply-template", tokens.apply_template, methods=["POST"]),
    ]
    if settings.page:
        routes.append(Route("/", page.page, methods=["GET"]))
    found = Starlette(
        routes=[*routes, *map(_alias, filter(_has_alias, routes))],
        middleware=[Middleware(Guard, settings=settings, rejected=service.metrics.rejected)],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_left,
        },
    )
    found.router.redirect_slashes = False  # a redirect would lose the body
    found.state.service = service
    return found


def _has_alias(route: Route) -> bool:
    return route.path.startswith(_ALIASED)


def _alias(route: Route) -> Route:
    """Returns a route without /v1, or with it if the route has none."""
    path = route.path.removeprefix("/v1") if route.path.startswith("/v1") else f"/v1{route.path}"
    return Route(path, route.endpoint, methods=list(route.methods or ()), include_in_schema=False)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    if not own_path(request.scope).endswith("/health"):  # probes while the model loads
        request.app.state.service.metrics.rejected(error.code or str(error.status))
    return error.response(request.scope)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: f"there is no {request.url.path[:200]}", 405: "the method is not allowed"}
    message = messages.get(error.status_code, error.detail)
    headers = dict(error.headers or {})
    return ApiError(error.status_code, message, headers=headers).response(request.scope)


async def _client_left(_: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)
