"""Reads pooling and normalization of embeddings from a model's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .config import Config

#: Poolings of a text's hidden states; "none" keeps one vector per token.
POOLINGS = ("mean", "last", "cls", "none")
#: Pooling of files without the key.
USUAL = "mean"

#: Indexed by GGUF's numbers; "rank" is a classification head, which returns a score.
_TYPES = ("none", "mean", "cls", "last", "rank")

#: Keys for settings of sentence-transformers that GGUF has no key for: whether embeddings are
#: normalized to length 1, and the reason if they cannot be computed here.
NORMALIZE = "jax_q4k.embeddings.normalize"
UNSUPPORTED = "jax_q4k.embeddings.unsupported"


def key_of(architecture: str) -> str:
    """Returns the metadata key of the pooling."""
    return f"{architecture}.pooling_type"


def metadata_of(architecture: str, pooling: str) -> dict[str, Any]:
    """Returns metadata that selects a pooling."""
    return {key_of(architecture): _TYPES.index(pooling)}


def pooling_of(metadata: Mapping[str, Any], architecture: str) -> str:
    """Returns the pooling of a file, one of POOLINGS.

    Raises:
      ValueError: the file's pooling is unknown or not supported; the message names the key.
    """
    if (reason := metadata.get(UNSUPPORTED)) is not None:
        raise ValueError(f"{reason}; pass pooling=, one of {', '.join(POOLINGS)}, to override it")
    key = key_of(architecture)
    value = metadata.get(key)
    if value is None:
        return USUAL
    names = dict(enumerate(_TYPES))
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    name = names.get(int(value)) if is_number else None
    if name not in POOLINGS:
        known = ", ".join(f"{i} ({names[i]})" for i in names if names[i] in POOLINGS)
        shown = f"{value!r} ({name})" if name else repr(value)
        raise ValueError(f"{key} is {shown}; supported: {known}; pass pooling= to choose one")
    return name


def normalizes(metadata: Mapping[str, Any]) -> bool:
    """Returns whether the file asks for embeddings of length 1."""
    return metadata.get(NORMALIZE) is True


def head_pooling_of(metadata: Mapping[str, Any], config: Config) -> str:
    """Returns the pooling before the classification head: "cls" or "mean", of decoders "last"."""
    if not config.kind.bidirectional:
        return "last"
    value: Any = metadata.get(f"{config.architecture}.classifier.pooling_type")
    return {1: "mean", 2: "cls"}.get(value, config.kind.head_pooling)
