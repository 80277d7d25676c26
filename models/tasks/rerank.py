"""Scores documents by their relevance for a query, with a reranker."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ..engine.encoding import EncoderRuns
from ..engine.reranking import pairs_of, scores_of, wanted_of
from ..runner.model import Model
from .embeddings import vectors_of_rows


@dataclasses.dataclass(frozen=True)
class Ranked:
    """A document's place in a ranking.

    Attributes:
      index: its index in the list of documents.
      score: its relevance for the query; higher is better.
    """

    index: int
    score: float


def rerank(
    model: Model,
    query: str,
    documents: Sequence[str],
    *,
    normalize: bool = True,
    progress: Callable[[int, int], object] | None = None,
) -> list[Ranked]:
    """Ranks documents by their relevance for a query, the most relevant first.

    The model is a reranker: an encoder with a classification head, such as bge-reranker, or
    Qwen3-Reranker in a GGUF file that llama.cpp's converter made.

    Args:
      normalize: scores are from 0 to 1: the sigmoid of the logit, or with several labels the
        probability of the first. Otherwise they are the first label's logit.
      progress: called with (documents done, number of documents).

    Raises:
      ValueError: the model is no reranker or has no tokenizer; no documents; a query and document
        beyond the context length. TypeError: query or documents of another type.
        All are raised before any computation.
    """
    pairs = pairs_of(model, query, documents, model.config.context_length)
    wanted = wanted_of(model)
    vectors = vectors_of_rows(model, pairs, wanted.pooling, False, progress, dense=False)
    scores = scores_of(EncoderRuns(model).scores(np.stack(vectors)), normalize=normalize)
    order = np.argsort(-scores, kind="stable")
    return [Ranked(int(i), float(scores[i])) for i in order]
