"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ..engine.arguments import embedding_settings, task_number, with_prompt
from ..engine.encoder_engine import EncoderEngine
from ..engine.encoding import Text, Vectors
from ..engine.prompt_results import normalized
from ..tasks.embeddings import numbers
from . import bodies
from .answers import Answers, failures, while_connected
from .completions import prompts_of
from .errors import ApiError, json_response, late
from .parameters import check_number
from .service import Service


class Embeddings(msgspec.Struct, kw_only=True):
    """Body of an embeddings request.

    Attributes:
      input: a text, texts, ids, or lists of ids.
      encoding_format: numbers, or base64 of little-endian float32.
      dimensions: number of first elements to return, of length 1 again; None means all.
      task: one of the model's tasks, whose adapter and prompt apply, as in Jina's API.
    """

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    task: str | None = None
    user: str | None = None


async def create(request: Request) -> Response:
    """Returns the embedding of each text, of length 1."""
    service: Service = request.app.state.service
    engine = service.ready()
    body, ignored = await bodies.read(request, Embeddings, service.settings)
    if service.adapter_of(body.model) is not None:
        raise ApiError(400, "embeddings are the model's, not an adapter's", param="model")
    check_number("dimensions", body.dimensions, 1, engine.model.config.hidden_size)
    try:
        task = task_number(engine.model, body.task)
    except ValueError as error:
        raise ApiError(400, str(error), param="task") from None
    given = with_prompt(engine.model, body.task, body.input)
    rows = await prompts_of(service, given, "input", add_end=True)
    context = engine.stats().max_context
    if (longest := max(map(len, rows))) > context:
        message = f"input has {longest} tokens; the context length is {context}"
        raise ApiError(400, message, param="input", code="context_length_exceeded")
    texts = [Text(np.array(row, np.int32), task=task) for row in rows]
    vectors = await vectors_of(request, service, texts, normalize=True)
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(_cut(vector, body), body)}
        for i, vector in enumerate(vectors)
    ]
    total = sum(map(len, rows))
    usage = {"prompt_tokens": total, "total_tokens": total}
    found = {"object": "list", "data": data, "model": service.settings.name, "usage": usage}
    return json_response(found, headers=bodies.listed(ignored))


async def vectors_of(
    request: Request,
    service: Service,
    texts: Sequence[Text],
    wanted: Vectors | None = None,
    *,
    normalize: bool = False,
) -> list[np.ndarray]:
    """Returns the vector of each text, for as long as the client stays; raises ApiError.

    wanted: None means embeddings with the model's pooling, of which `normalize` tells whether they
    have length 1.
    """
    engine = service.ready()
    try:
        async with asyncio.timeout(service.settings.seconds):
            if isinstance(engine, EncoderEngine):
                work = _encoded_texts(service, engine, texts, wanted, normalize=normalize)
                return await while_connected(request.receive, work)
            with Answers(service) as answers:
                pooling = None if wanted is None else wanted.pooling
                ids = [text.ids.tolist() for text in texts]
                work = answers.embeddings(ids, pooling, normalize=normalize)
                return await while_connected(request.receive, work)
    except TimeoutError:
        raise late(service.settings.seconds) from None


async def _encoded_texts(
    service: Service,
    engine: EncoderEngine,
    texts: Sequence[Text],
    wanted: Vectors | None,
    *,
    normalize: bool,
) -> list[np.ndarray]:
    """Returns the vectors that an encoder computes; they take one place."""
    service.places.take(1)
    try:
        if wanted is None:
            try:
                wanted = Vectors(*embedding_settings(engine.model, None, normalize))
            except ValueError as error:
                raise ApiError(400, str(error), param="input") from None
        with failures():
            running = engine.submit(texts, wanted)
            try:
                return list(await asyncio.gather(*map(asyncio.wrap_future, running)))
            finally:
                for one in running:
                    one.cancel()
    finally:
        service.places.give_back(1)


def _cut(vector: np.ndarray, body: Embeddings) -> np.ndarray:
    """Returns the first `dimensions` elements of a vector, of length 1 again."""
    return vector if body.dimensions is None else normalized(vector[..., : body.dimensions])


def _encoded(vector: np.ndarray, body: Embeddings) -> str | list[float]:
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return numbers(vector)
