"""Pooling and normalization of vectors, as a model's file says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

#: How the vectors of a text become one; "none": they do not.
POOLINGS = ("mean", "last", "cls", "none")
#: Where a file says nothing.
USUAL = "mean"

#: GGUF's numbers; "rank" is a classifier's head, which gives a score instead of a vector.
_TYPES = ("none", "mean", "cls", "last", "rank")

#: Keys for what a sentence-transformers folder says and GGUF has no key for: whether vectors are
#: divided by their length, and why its vectors cannot be made here.
NORMALIZE = "jax_q4k.embeddings.normalize"
UNSUPPORTED = "jax_q4k.embeddings.unsupported"


def key_of(architecture: str) -> str:
    """The metadata key of the pooling."""
    return f"{architecture}.pooling_type"


def metadata_of(architecture: str, pooling: str) -> dict[str, Any]:
    """Metadata that says a pooling."""
    return {key_of(architecture): _TYPES.index(pooling)}


def pooling_of(metadata: Mapping[str, Any], architecture: str) -> str:
    """The pooling of a file, one of POOLINGS.

    Raises:
      ValueError: the file asks for one that is unknown or not supported; the message names its key.
    """
    if (reason := metadata.get(UNSUPPORTED)) is not None:
        raise ValueError(f"{reason}; pass pooling=, one of {', '.join(POOLINGS)}, to do without")
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
        raise ValueError(f"{key} is {shown}; supported are {known}: pass pooling= to choose one")
    return name


def normalizes(metadata: Mapping[str, Any]) -> bool:
    """Tells whether a file divides vectors by their length."""
    return metadata.get(NORMALIZE) is True
