"""Prepares pairs of query and document for a reranker, and converts its logits to scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..chat.token_escaping import SpecialTokenEscaper
from ..config.pooling import head_pooling_of
from ..runner.model import Model
from ..tokenizer import Tokenizer
from .encoding import Text, Vectors

#: Name of the chat template that joins query and document, with {query} and {document}.
TEMPLATE = "rerank"


def check_reranker(model: Model, *, has_texts: bool = True) -> None:
    """Raises ValueError unless the model is a reranker, with a tokenizer."""
    if not model.has_head:
        architecture = model.config.architecture
        raise ValueError(f"the model, {architecture}, has no classification head: no reranker")
    if has_texts and model.tokenizer is None:
        raise ValueError("the model has no tokenizer, so it cannot read texts")


def wanted_of(model: Model) -> Vectors:
    """Returns what a reranker's head takes: vectors without normalization."""
    return Vectors(head_pooling_of(model.metadata, model.config), dense=False)


def pairs_of(model: Model, query: str, documents: Sequence[str], context: int) -> list[Text]:
    """Tokenizes the query with each document.

    context: most tokens of a pair.

    Raises:
      TypeError: query or documents of another type. ValueError: no documents, a pair beyond
        `context`, or no reranker; the message names the document.
    """
    check_reranker(model)
    if not isinstance(query, str):
        raise TypeError(f"query is of type {type(query).__name__}; it must be a text")
    if isinstance(documents, str | bytes) or not isinstance(documents, Sequence):
        kind = type(documents).__name__
        raise TypeError(f"documents is of type {kind}; it must be a list of texts")
    if not documents:
        raise ValueError("documents is empty; at least one text is needed")
    assert model.tokenizer is not None
    found = []
    for i, document in enumerate(documents):
        if not isinstance(document, str):
            kind = type(document).__name__
            raise TypeError(f"documents[{i}] is of type {kind}; it must be a text")
        text = _pair(model.tokenizer, query, document)
        if len(text.ids) > context:
            problem = f"with the query has {len(text.ids)} tokens; the context length is {context}"
            raise ValueError(f"documents[{i}] {problem}")
        found.append(text)
    return found


def scores_of(logits: np.ndarray, *, normalize: bool) -> np.ndarray:
    """Converts logits (n, labels) to scores (n,): higher ones are more relevant.

    normalize: to 0..1, by a sigmoid if there is one label, else by a softmax of which the first
    label, as "yes", is taken. Otherwise the first logit.
    """
    logits = logits.astype(np.float64)
    if not normalize:
        return logits[:, 0]
    if logits.shape[1] == 1:
        return 1 / (1 + np.exp(-logits[:, 0]))
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return (shifted / shifted.sum(axis=1, keepdims=True))[:, 0]


def _pair(tokenizer: Tokenizer, query: str, document: str) -> Text:
    template = tokenizer.chat_templates.get(TEMPLATE)
    if template is None:
        ids, second = tokenizer.encode_pair(query, document)
        return Text(np.array(ids, np.int32), second)
    values: Any = {"query": query, "document": document}
    escaper = SpecialTokenEscaper(tokenizer.control_tokens, list(values.values()))
    parts = template.replace("{document}", "{query}").split("{query}")
    names = _names(template)
    text = parts[0]
    for name, after in zip(names, parts[1:], strict=True):
        text += escaper.escaped(values[name]) + after
    ids = tokenizer.encode(text, add_special=False, parse_special=True, marks=escaper.meanings)
    return Text(np.array(ids, np.int32))


def _names(template: str) -> list[str]:
    """Returns the placeholders of a template in their order."""
    found = []
    while (at := template.find("{")) >= 0:
        template = template[at:]
        found += [n for n in ("query", "document") if template.startswith(f"{{{n}}}")]
        template = template[1:]
    return found
