"""Stores YaRN's frequency divisors in metadata for architectures without a tensor for them.

llama.cpp rejects files with a tensor that it does not read, but ignores unknown metadata keys. It
then rounds YaRN's ramp to whole pairs, as its converter does. Divisors of other ropes stay tensors:
without them the frequencies would be others altogether.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_q4k import GGUFError, gguf

from ..config import Config
from ..config.rope import DIVISORS
from ..config.rope_fields import MIN_DIVISOR

#: Metadata key; one number per pair of a head's dimensions.
KEY = "jax_q4k.rope_freqs"
_TENSOR = DIVISORS[0]


def in_metadata(
    config: Config, metadata: Mapping[str, Any], tensors: Mapping[str, gguf.TensorPieces]
) -> tuple[gguf.Metadata, dict[str, gguf.TensorPieces]]:
    """Moves the divisors of a file to write from tensors to metadata, if the architecture needs it.

    Returns metadata and tensors.
    """
    full, left = gguf.Metadata(metadata), dict(tensors)
    in_files = config.kind.rope_freqs or config.yarn is None
    if not in_files and (found := left.pop(_TENSOR, None)) is not None:
        pieces = [np.asarray(piece, np.float32).reshape(-1) for piece in found.made()]
        full[KEY] = np.concatenate(pieces).tolist()
    return full, left


def of_metadata(config: Config, metadata: Mapping[str, Any], file: str) -> dict[str, np.ndarray]:
    """Reads rope divisors from metadata: GGUF name -> float32 (rope_dim / 2,); {} if absent.

    Raises GGUFError that names the key if they are invalid.
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
