"""Q6_K: 256 weights in 210 bytes; weight = d * scale[s] * (q - 32), int8 scales of sub-blocks s of 16.

Source: ggml, `block_q6_K`. The block has two halves h of 128 weights, each of four groups g of 32.
Weight 128h + 32g + j takes its low four bits from byte 64h + 32(g % 2) + j of `ql` (low nibble for
g < 2, high for g >= 2) and its high two from bits 2g of byte 32h + j of `qh`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .base import BlockFormat, bits, half


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    blocks = field["ql"].shape[:-1]
    low = bits(field["ql"].reshape(*blocks, 2, 64), 2, 4, xp).reshape(*blocks, 256)
    high = bits(field["qh"].reshape(*blocks, 2, 32), 4, 2, xp).reshape(*blocks, 256)
    quants = (low | (high << 4)).astype(np.float32) - np.float32(32)
    step = half(field["d"]) * field["scales"].view(np.int8).astype(np.float32)
    weights = step[..., None] * quants.reshape(*blocks, 16, 16)
    return weights.reshape(*blocks, 256)


FORMAT = BlockFormat(
    name="Q6_K",
    block_size=256,
    block_bytes=210,
    struct=(("ql", 128), ("qh", 64), ("scales", 16), ("d", 2)),
    layout=(("ql", ("ql",)), ("qh", ("qh",)), ("scales", ("scales",)), ("d", ("d",))),
    half_fields=("d",),
    weights=_weights,
)
