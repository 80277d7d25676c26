"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ..tasks.embeddings import embed, numbers
from . import bodies
from .answers import Answers, while_connected
from .completions import prompts_of
from .errors import ApiError, json_response, late
from .parameters import refuse
from .service import Service


class Embeddings(msgspec.Struct, kw_only=True):
    """Body of an embeddings request.

    Attributes:
      input: a text, texts, ids, or lists of ids.
      encoding_format: numbers, or base64 of little-endian float32.
    """

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None


async def create(request: Request) -> Response:
    """Returns the embedding of each text, of length 1."""
    service: Service = request.app.state.service
    answers, running = Answers(service), None
    try:
        body, ignored = await bodies.read(request, Embeddings, service.settings)
        if service.adapter_of(body.model) is not None:
            raise ApiError(400, "embeddings are the model's, not an adapter's", param="model")
        model = answers.engine.model
        if model.placement is not None and model.placement.spans_processes:
            raise ApiError(400, "embeddings are not computed over several processes")
        refuse("dimensions", body.dimensions not in (None, model.config.hidden_size))
        rows = await prompts_of(service, body.input, "input", add_end=True)
        context = model.config.context_length
        if (longest := max(map(len, rows))) > context:
            message = f"input has {longest} tokens; the context length is {context}"
            raise ApiError(400, message, param="input", code="context_length_exceeded")

        async def vectors() -> np.ndarray:
            async with service.embedding:
                ids = [np.array(row, np.int32) for row in rows]
                found: np.ndarray = await asyncio.to_thread(embed, model, ids, normalize=True)
                return found

        # A thread cannot be cancelled: it keeps its place, and others wait, until it ends.
        running = asyncio.ensure_future(vectors())
        running.add_done_callback(lambda _: answers.close())
        try:
            async with asyncio.timeout(service.settings.seconds):
                found = await while_connected(request.receive, asyncio.shield(running))
        except TimeoutError:
            raise late(service.settings.seconds) from None
        except ValueError as error:
            raise ApiError(400, str(error), param="input") from None
    finally:
        if running is None:
            answers.close()
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(vector, body.encoding_format)}
        for i, vector in enumerate(found)
    ]
    total = sum(map(len, rows))
    usage = {"prompt_tokens": total, "total_tokens": total}
    found_all = {"object": "list", "data": data, "model": service.settings.name, "usage": usage}
    return json_response(found_all, headers=bodies.listed(ignored))


def _encoded(vector: np.ndarray, form: str | None) -> str | list[float]:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return numbers(vector)
