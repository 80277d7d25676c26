"""Random packed weights as a QuantizedArray."""

from __future__ import annotations

import numpy as np

import jax_q4k as jq
from ptx_kernels import formats
from ptx_kernels.kernels.operands import random_blocks


def random_weights(format: str, n: int, k: int, seed: int = 0) -> jq.QuantizedArray:
    """A QuantizedArray (n, k) of `format` with finite values."""
    raw = random_blocks(
        format, (n, k // formats.get(format).block_size), np.random.default_rng(seed)
    )
    return jq.QuantizedArray.from_gguf_bytes(raw, format, (n, k))
