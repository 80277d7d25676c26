"""Q8_0: 32 weights in 34 bytes; weight = d * q, q int8. Source: ggml, `block_q8_0`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .base import BlockFormat, half


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    return half(field["d"]) * field["qs"].view(np.int8).astype(np.float32)


FORMAT = BlockFormat(
    name="Q8_0",
    block_size=32,
    block_bytes=34,
    struct=(("d", 2), ("qs", 32)),
    layout=(("qs", ("qs",)), ("d", ("d",))),
    half_fields=("d",),
    weights=_weights,
)
