"""Default sampling parameters: a model file's, and `USUAL`, the command line's without those."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..support.warn import warn
from .params import Sampling

#: Field of Sampling -> GGUF key.
KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}

#: GGUF key that `Sampling` lacks -> value that disables it.
_NOT_APPLIED: dict[str, Any] = {
    "general.sampling.sequence": "",
    "general.sampling.xtc_probability": 0,
    "general.sampling.mirostat": 0,
}
#: Number of tokens that a repetition penalty considers; here always all.
_LAST_TOKENS = "general.sampling.penalty_last_n"

#: The command line's default sampling parameters, for files without any.
USUAL = {"temperature": 0.7, "min_p": 0.05}


def default_sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Sampling` that a model file's metadata sets, by name.

    Warns about keys that are not applied.

    Raises:
      ValueError: a value has another type or is out of range; the message names the key.
    """
    found = {}
    for field, key in KEYS.items():
        if key not in metadata:
            continue
        try:
            found[field] = getattr(Sampling(**{field: metadata[key]}), field)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key}: {error}") from None
    neutral = dict(_NOT_APPLIED)
    if found.get("repetition_penalty", 1) != 1:
        neutral[_LAST_TOKENS] = -1
    suggested = {key: metadata[key] for key in neutral if key in metadata}
    ignored = [
        f"{key}={str(value):.60}"
        for key, value in suggested.items()
        if np.ndim(value) or value != neutral[key]
    ]
    if ignored:
        warn(f"the file suggests {', '.join(ignored)}, which is not applied")
    return found
