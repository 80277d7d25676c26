"""Q5_1: 32 weights in 24 bytes; weight = d * q + m.

Source: ggml, `block_q5_1`. `qh` and `qs` hold the quants as Q5_0's do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..ptx import Builder, Pointer, Value, u32
from . import q5_0
from .base import BlockFormat
from .base import half as half_values
from .unpack import DecodedRun, half


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    return half_values(field["d"]) * q5_0.quants(field, xp) + half_values(field["m"])


FORMAT = BlockFormat(
    name="Q5_1",
    block_size=32,
    block_bytes=24,
    struct=(("d", 2), ("m", 2), ("qh", 4), ("qs", 16)),
    layout=(("qs", ("qs",)), ("qh", ("qh",)), ("dm", ("d", "m"))),
    half_fields=("d", "m"),
    weights=_weights,
)


PARTS = q5_0.PARTS


def unpack(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DecodedRun]:
    """All 32 weights of a block (see `unpack.Unpack`)."""
    qs, qh, dm = planes
    pair = dm.cast(u32).load()
    scale, offset = half(pair), half(pair, 1)
    return [
        DecodedRun(16 * i, [scale * v + offset for v in values])
        for i, values in enumerate(q5_0.unpack_quants(k, qs, qh))
    ]
