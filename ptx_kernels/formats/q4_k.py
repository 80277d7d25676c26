"""Q4_K: 256 weights in 144 bytes; weight = d * scale[s] * q - dmin * min[s], sub-blocks s of 32.

Source: ggml, `block_q4_K`. Byte j of the 32-byte group c of `qs` holds weight 64c + j in its low nibble
and weight 64c + 32 + j in its high one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from . import k_scales
from .base import BlockFormat, half, nibbles


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    scale, minimum = k_scales.unpack(field["scales"], xp)
    groups = field["qs"].reshape(*field["qs"].shape[:-1], 4, 32)
    quants = nibbles(groups, xp).reshape(*groups.shape[:-2], 8, 32)
    step = half(field["d"]) * scale.astype(np.float32)
    low = half(field["dmin"]) * minimum.astype(np.float32)
    weights = step[..., None] * quants.astype(np.float32) - low[..., None]
    return weights.reshape(*weights.shape[:-2], 256)


FORMAT = BlockFormat(
    name="Q4_K",
    block_size=256,
    block_bytes=144,
    struct=(("d", 2), ("dmin", 2), ("scales", 12), ("qs", 128)),
    layout=(("block", ("d", "dmin", "scales", "qs")),),  # 144 = 9 * 16: aligned as it lies
    half_fields=("d", "dmin"),
    weights=_weights,
)
