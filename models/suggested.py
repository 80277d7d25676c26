"""Ways of sampling that a model's file suggests, and those where it says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .sampling import Sampling

#: Fields of Sampling -> GGUF's keys.
KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}

#: The command line's, for files that suggest none.
USUAL = {"temperature": 0.7, "min_p": 0.05}


def suggested(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Sampling that a file's metadata suggests; none where it says nothing.

    Raises:
      ValueError: one is of another type or out of range; the message names its key.
    """
    found = {}
    for field, key in KEYS.items():
        if key not in metadata:
            continue
        try:
            found[field] = getattr(Sampling(**{field: metadata[key]}), field)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key}: {error}") from None
    return found
