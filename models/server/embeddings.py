"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ..engine.prompt_results import normalized
from ..tasks.embeddings import numbers
from . import bodies
from .answers import Answers, while_connected
from .completions import prompts_of
from .errors import ApiError, json_response, late
from .generation import with_answers
from .parameters import check_number
from .service import Service


class Embeddings(msgspec.Struct, kw_only=True):
    """Body of an embeddings request.

    Attributes:
      input: a text, texts, ids, or lists of ids.
      encoding_format: numbers, or base64 of little-endian float32.
      dimensions: number of first elements to return, of length 1 again; None means all.
    """

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None


@with_answers
async def create(request: Request, service: Service, answers: Answers) -> Response:
    """Returns the embedding of each text, of length 1."""
    body, ignored = await bodies.read(request, Embeddings, service.settings)
    if service.adapter_of(body.model) is not None:
        raise ApiError(400, "embeddings are the model's, not an adapter's", param="model")
    check_number("dimensions", body.dimensions, 1, answers.engine.model.config.hidden_size)
    rows = await prompts_of(service, body.input, "input", add_end=True)
    context = answers.engine.stats().max_context
    if (longest := max(map(len, rows))) > context:
        message = f"input has {longest} tokens; the context length is {context}"
        raise ApiError(400, message, param="input", code="context_length_exceeded")
    try:
        async with asyncio.timeout(service.settings.seconds):
            vectors = await while_connected(request.receive, answers.embeddings(rows))
    except TimeoutError:
        raise late(service.settings.seconds) from None
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(_cut(vector, body), body)}
        for i, vector in enumerate(vectors)
    ]
    total = sum(map(len, rows))
    usage = {"prompt_tokens": total, "total_tokens": total}
    found = {"object": "list", "data": data, "model": service.settings.name, "usage": usage}
    return json_response(found, headers=bodies.listed(ignored))


def _cut(vector: np.ndarray, body: Embeddings) -> np.ndarray:
    """Returns the first `dimensions` elements of a vector, of length 1 again."""
    return vector if body.dimensions is None else normalized(vector[..., : body.dimensions])


def _encoded(vector: np.ndarray, body: Embeddings) -> str | list[float]:
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return numbers(vector)
