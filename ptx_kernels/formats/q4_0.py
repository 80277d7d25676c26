"""Q4_0: 32 weights in 18 bytes; weight = d * (q - 8).

Source: ggml, `block_q4_0`. Byte j of `qs` holds weight j in its low nibble and weight 16 + j in its
high one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .base import BlockFormat, half, nibbles


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    return half(field["d"]) * (nibbles(field["qs"], xp).astype(np.float32) - np.float32(8))


FORMAT = BlockFormat(
    name="Q4_0",
    block_size=32,
    block_bytes=18,
    struct=(("d", 2), ("qs", 16)),
    layout=(("qs", ("qs",)), ("d", ("d",))),
    half_fields=("d",),
    weights=_weights,
)
