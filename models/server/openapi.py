"""GET /openapi.json: the routes, with schemas of their bodies."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import jax_q4k

from . import (
    adapters,
    chat_completions,
    completions,
    embeddings,
    messages,
    rerank,
    responses,
    tokens,
)
from .errors import json_response

#: Path -> (what it does, type of its body).
POSTS: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "/v1/chat/completions": ("Answers a conversation", chat_completions.ChatCompletion),
    "/v1/chat/completions/input_tokens": (
        "Counts the tokens of a prompt",
        chat_completions.ChatCompletion,
    ),
    "/v1/completions": ("Continues texts", completions.Completion),
    "/v1/embeddings": ("Computes embeddings of texts", embeddings.Embeddings),
    "/v1/rerank": ("Ranks documents by their relevance for a query", rerank.Rerank),
    "/v1/messages": ("Answers a conversation, in Anthropic's API", messages.Message),
    "/v1/messages/count_tokens": ("Counts the tokens of a prompt", messages.Conversation),
    "/v1/responses": ("Answers a conversation, in the Responses API", responses.CreateResponse),
    "/v1/responses/input_tokens": ("Counts the tokens of a prompt", responses.CreateResponse),
    "/v1/load_lora_adapter": ("Loads a LoRA adapter", adapters.LoadAdapter),
    "/v1/unload_lora_adapter": ("Unloads a LoRA adapter", adapters.UnloadAdapter),
    "/tokenize": ("Returns the token ids of a text", tokens.Tokenize),
    "/detokenize": ("Returns the text of token ids", tokens.Detokenize),
    "/apply-template": ("Returns a conversation's prompt", tokens.ApplyTemplate),
}
#: Path -> what it says.
GETS = {
    "/": "The chat page",
    "/v1/models": "Lists the model and its LoRA adapters",
    "/v1/models/{id}": "Describes the model or an adapter",
    "/health": "Says whether requests are served",
    "/metrics": "Prometheus metrics",
    "/version": "Version of the package",
    "/openapi.json": "This description",
}
_STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
#: Path -> type of an answer that is not JSON.
_TYPES = {"/": "text/html", "/metrics": "text/plain"} | dict.fromkeys(
    ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "text/plain"
)


async def openapi(_: Request) -> Response:
    """Returns the description of all routes."""
    return json_response(described())


@functools.cache
def described() -> dict[str, Any]:
    """Returns the routes as OpenAPI 3.1."""
    kinds = [kind for _, kind in POSTS.values()]
    bodies, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    components["Error"] = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type"],
                "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
            }
        },
    }
    paths: dict[str, Any] = {}
    for (path, (summary, _)), body in zip(POSTS.items(), bodies, strict=True):
        content = {"application/json": {"schema": body}}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": content},
                "responses": _responses(path, 400, 401, 403, 404, 408, 413, 415, 429, 503),
            }
        }
    for path, summary in GETS.items():
        paths[path] = {
            "get": {"summary": summary, "responses": _responses(path, 401, 403, 404, 503)}
        }
        if "{id}" in path:
            of_id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
            paths[path]["get"]["parameters"] = [of_id]
    return {
        "openapi": "3.1.0",
        "info": {"title": "jax-q4k", "version": jax_q4k.__version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _responses(path: str, *statuses: int) -> dict[str, Any]:
    kinds = [_TYPES.get(path, "application/json")]
    kinds += ["text/event-stream"] if path in _STREAMS else []
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "200": {"description": "The answer", "content": {kind: {} for kind in kinds}},
        **{str(status): {"description": "An error", "content": error} for status in statuses},
    }
