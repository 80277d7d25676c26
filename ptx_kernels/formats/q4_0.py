"""Q4_0: 32 weights in 18 bytes; weight = d * (q - 8).

Source: ggml, `block_q4_0`. Byte j of `qs` holds weight j in its low nibble and weight 16 + j in its
high one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..ptx import Builder, Pointer, Value, f16, f32, u32
from .base import BlockFormat, half, nibbles
from .unpack import DecodedRun, byte_floats


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


PARTS = 1  # threads that decode a block


def unpack(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DecodedRun]:
    """All 32 weights of a block (see `unpack.Unpack`)."""
    qs, d = planes
    scale = d.cast(f16).load().to(f32)
    words = qs.cast(u32).load(vector=4)
    return [
        DecodedRun(
            16 * high,
            [scale * (v - 8.0) for v in byte_floats(k, [(w >> 4 * high) & 0x0F0F0F0F for w in words])],
        )
        for high in range(2)
    ]
