"""Q5_0: 32 weights in 22 bytes; weight = d * (q - 16).

Source: ggml, `block_q5_0`. Byte j of `qs` holds the low four bits of weight j in its low nibble and of
weight 16 + j in its high one; bit i of `qh`, a little-endian 32-bit word, is the fifth bit of weight i.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .base import BlockFormat, bits, half, nibbles


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    fifth = bits(field["qh"][..., None], 8, 1, xp)  # (..., 4, 8, 1)
    quants = nibbles(field["qs"], xp) | (fifth.reshape(*field["qh"].shape[:-1], 32) << 4)
    return half(field["d"]) * (quants.astype(np.float32) - np.float32(16))


FORMAT = BlockFormat(
    name="Q5_0",
    block_size=32,
    block_bytes=22,
    struct=(("d", 2), ("qh", 4), ("qs", 16)),
    layout=(("qs", ("qs",)), ("qh", ("qh",)), ("d", ("d",))),
    half_fields=("d",),
    weights=_weights,
)
