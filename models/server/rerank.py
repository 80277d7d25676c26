"""POST /v1/rerank."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ..engine.encoding import EncoderRuns
from ..engine.reranking import check_reranker, pairs_of, scores_of, wanted_of
from . import bodies
from .embeddings import vectors_of
from .errors import ApiError, json_response
from .generation import check_length
from .service import Service

#: Documents of a request.
MOST_DOCUMENTS = 2048


class Document(msgspec.Struct):
    """A document as an object, as in Cohere's and Jina's APIs."""

    text: str


class Rerank(msgspec.Struct, kw_only=True):
    """Body of a rerank request, in the form of Jina's and Cohere's APIs.

    Attributes:
      documents: texts, or objects with a text.
      top_n: number of results; None means all.
      return_documents: whether results have their documents.
      normalize: whether scores are from 0 to 1; else they are the model's logits.
    """

    query: str
    documents: list[str | Document]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool = False
    normalize: bool = True
    user: str | None = None


async def create(request: Request) -> Response:
    """Returns the documents by their relevance for the query, the most relevant first."""
    service: Service = request.app.state.service
    engine = service.ready()
    body, ignored = await bodies.read(request, Rerank, service.settings)
    if service.adapter_of(body.model) is not None:
        raise ApiError(400, "scores are the model's, not an adapter's", param="model")
    if body.top_n is not None and body.top_n < 1:
        raise ApiError(400, f"top_n={body.top_n} must be at least 1", param="top_n")
    if not 1 <= len(body.documents) <= MOST_DOCUMENTS:
        message = f"documents has {len(body.documents)} texts; 1 to {MOST_DOCUMENTS} are possible"
        raise ApiError(400, message, param="documents")
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    model, context = engine.model, engine.stats().max_context
    try:
        check_reranker(model)
        for text in (body.query, *texts):
            check_length(service, [text], "documents")
        pairs = await asyncio.to_thread(pairs_of, model, body.query, texts, context)
    except ValueError as error:
        raise ApiError(400, str(error), param="documents") from None
    vectors = await vectors_of(request, service, pairs, wanted_of(model))

    def scored() -> np.ndarray:
        logits = EncoderRuns(model).scores(np.stack(vectors))
        return scores_of(logits, normalize=body.normalize)

    scores = await asyncio.to_thread(scored)
    order = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
    total = sum(len(pair.ids) for pair in pairs)
    found: dict[str, Any] = {
        "object": "list",
        "model": service.settings.name,
        "usage": {"prompt_tokens": total, "total_tokens": total},
        "results": [
            {"index": i, "relevance_score": float(scores[i])}
            | ({"document": {"text": texts[i]}} if body.return_documents else {})
            for i in order
        ],
    }
    return json_response(found, headers=bodies.listed(ignored))
