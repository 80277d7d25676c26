"""Q5_K: 256 weights in 176 bytes; weight = d * scale[s] * q - dmin * min[s], sub-blocks s of 32.

Source: ggml, `block_q5_K`. `qs` as in Q4_K holds the low four bits; bit s of `qh[j]` is the fifth bit
of weight 32s + j.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from . import k_scales
from .base import BlockFormat, bits, half, nibbles


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    scale, minimum = k_scales.unpack(field["scales"], xp)
    groups = field["qs"].reshape(*field["qs"].shape[:-1], 4, 32)
    low_bits = nibbles(groups, xp).reshape(*groups.shape[:-2], 8, 32)
    quants = low_bits | (bits(field["qh"], 8, 1, xp) << 4)
    step = half(field["d"]) * scale.astype(np.float32)
    low = half(field["dmin"]) * minimum.astype(np.float32)
    weights = step[..., None] * quants.astype(np.float32) - low[..., None]
    return weights.reshape(*weights.shape[:-2], 256)


FORMAT = BlockFormat(
    name="Q5_K",
    block_size=256,
    block_bytes=176,
    struct=(("d", 2), ("dmin", 2), ("scales", 12), ("qh", 32), ("qs", 128)),
    layout=(("block", ("d", "dmin", "scales", "qh", "qs")),),  # 176 = 11 * 16: aligned as it lies
    half_fields=("d", "dmin"),
    weights=_weights,
)
