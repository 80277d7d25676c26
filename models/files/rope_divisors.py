"""Divisors of rope frequencies in GGUF files of architectures that have no tensor for them.

llama.cpp refuses a file that holds a tensor which it does not read. There the divisors are a key
of the metadata, which it ignores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_q4k import GGUFError, gguf

from ..config import Config
from ..config.rope import DIVISORS
from ..config.rope_fields import MIN_DIVISOR

#: Numbers, one for each pair of a head's dimensions.
KEY = "jax_q4k.rope_freqs"
_TENSOR = DIVISORS[0]


def in_metadata(
    config: Config, metadata: Mapping[str, Any], tensors: Mapping[str, gguf.TensorPieces]
) -> tuple[gguf.Metadata, dict[str, gguf.TensorPieces]]:
    """Metadata and tensors of a file to write, with the divisors where its readers look."""
    full, left = gguf.Metadata(metadata), dict(tensors)
    if config.kind.divisors_in_metadata and (found := left.pop(_TENSOR, None)) is not None:
        pieces = [np.asarray(piece, np.float32).reshape(-1) for piece in found.pieces()]
        full[KEY] = np.concatenate(pieces).tolist()
    return full, left


def of_metadata(config: Config, metadata: Mapping[str, Any], file: str) -> dict[str, np.ndarray]:
    """GGUF's name -> the divisors that a file's metadata holds, float32 (rope_dim / 2,).

    Raises GGUFError naming the key for what are no such numbers.
    """
    if KEY not in metadata:
        return {}
    pairs = config.rope_dim // 2
    try:
        divisors = np.asarray(metadata[KEY], np.float32)
    except (TypeError, ValueError, OverflowError):
        divisors = np.zeros(0, np.float32)
    is_right = divisors.shape == (pairs,) and np.isfinite(divisors).all()
    if not is_right or not (divisors > MIN_DIVISOR).all():
        raise GGUFError(file, KEY, f"must be {pairs} finite numbers above {MIN_DIVISOR}")
    return {_TENSOR: divisors}
