"""Computes text embeddings: pooled vectors of a decoder's or an encoder's last norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..engine.arguments import embedding_rows, embedding_settings
from ..engine.encoding import Text, Vectors, batches, encoded
from ..engine.generate import embeddings
from ..engine.prompt_results import vectors_of
from ..runner.model import Model


def embed(
    model: Model,
    texts: Any,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    task: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Any:
    """Computes embeddings of texts, float32 (rows, hidden_size), from the final norm's output.

    Embeddings do not depend on the other texts of a batch, except for rounding. BOS and EOS are
    added as the model's file asks, and are pooled like other tokens. The model is a decoder, or an
    encoder such as BERT.

    Args:
      texts: a text, a sequence of token ids, or a list of either kind with any lengths.
      pooling: "mean" over all tokens; "last", the last token, which attends to the whole
        text; "cls", the first token; or "none", one vector per token. None means the model's own
        pooling (`pooling_type`, or a folder's 1_Pooling), by default "mean".
      normalize: divides vectors by their length, except those of length 0. None means what the
        model's folder says (modules.json).
      task: one of `model.tasks`, such as "retrieval.query": its adapter applies, and its prompt
        goes before texts, not before ids. None means the base weights.
      progress: called with (texts done, number of texts).

    Returns:
      An array (rows, hidden_size), or (hidden_size,) for a single text; with pooling="none" a list
      of arrays (tokens, hidden_size), or one of them.

    Raises:
      ValueError: no texts, a text without tokens or beyond the context length, an id outside the
        vocabulary, a string but no tokenizer, an unknown task or pooling, or an unsupported one in
        the model's file. TypeError: texts of another type.
        All are raised before any computation.
    """
    pooling, normalize = embedding_settings(model, pooling, normalize)
    rows, single = embedding_rows(model, texts, model.config.context_length, task)
    found = vectors_of_rows(model, rows, pooling, normalize, progress)
    if single:
        return found[0]
    return found if pooling == "none" else np.stack(found)


def vectors_of_rows(
    model: Model,
    rows: list[Text],
    pooling: str,
    normalize: bool,
    progress: Callable[[int, int], object] | None = None,
    *,
    dense: bool = True,
) -> list[np.ndarray]:
    """Computes the vectors of texts given as ids, in batches; see `embed`.

    dense: whether dense layers after pooling apply.
    """
    if model.config.kind.bidirectional:
        return encoded(model, rows, Vectors(pooling, normalize, dense), progress)
    found: list[Any] = [None] * len(rows)
    done = 0
    for batch in batches(model, [len(row.ids) for row in rows]):
        empty = [vectors_of(len(rows[i].ids), pooling, normalize) for i in batch]
        vectors = embeddings(model, [rows[i].ids for i in batch], empty)
        for i, vector in zip(batch, vectors, strict=True):
            found[i] = vector
        done += len(batch)
        if progress is not None:
            progress(done, len(rows))
    return found


def numbers(vector: np.ndarray) -> list[Any]:
    """Returns the elements of a vector or matrix, rounded to the precision of float32."""
    if vector.ndim > 1:
        return [numbers(row) for row in vector]
    return [float(f"{x:.9g}") for x in vector.tolist()]
