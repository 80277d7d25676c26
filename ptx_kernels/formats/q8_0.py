"""Q8_0: 32 weights in 34 bytes; weight = d * q, q int8. Source: ggml, `block_q8_0`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..ptx import Builder, Pointer, Value, f16, f32, u32
from .base import BlockFormat, half
from .unpack import DecodedRun, signed_byte_floats


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


PARTS = 2  # threads that decode a block: 16 quants each


def unpack(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DecodedRun]:
    """16 weights of a block (see `unpack.Unpack`)."""
    qs, d = planes
    scale = d.cast(f16).load().to(f32)
    words = qs.cast(u32).at(part * 4).load(vector=4)
    return [DecodedRun(part * 16, [scale * v for v in signed_byte_floats(k, words)])]
