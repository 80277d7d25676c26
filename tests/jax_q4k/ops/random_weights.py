"""Random packed weights, finite in every format: bytes drawn at random, block scales set to sane ones."""

from __future__ import annotations

import numpy as np

import jax_q4k as jq
from ptx_kernels import formats

#: Byte offsets of the float16 scales within a block.
_SCALES = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_weights(format: str, n: int, k: int, seed: int = 0) -> jq.QuantizedArray:
    """A QuantizedArray (n, k) of `format`."""
    rng = np.random.default_rng(seed)
    block = formats.get(format)
    raw = rng.integers(0, 256, (n, k // block.block_size, block.block_bytes), np.uint8)
    for offset in _SCALES[format]:
        scales = rng.uniform(0.001, 0.01, raw.shape[:-1]).astype(np.float16)
        raw[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    return jq.QuantizedArray.from_gguf_bytes(raw.tobytes(), format, (n, k))
