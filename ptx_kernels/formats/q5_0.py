"""Q5_0: 32 weights in 22 bytes; weight = d * (q - 16).

Source: ggml, `block_q5_0`. Byte j of `qs` holds the low four bits of weight j in its low nibble and of
weight 16 + j in its high one; bit i of `qh`, a little-endian 32-bit word, is the fifth bit of weight i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..ptx import Builder, Pointer, Value, f16, f32, u32
from .base import BlockFormat, bits, half, nibbles
from .unpack import Run, byte_floats


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


PARTS = 1  # threads that decode a block


def unpack(k: Builder, planes: Sequence[Pointer], part: Value) -> list[Run]:
    """All 32 weights of a block (see `unpack.Unpack`)."""
    qs, qh, d = planes
    scale = d.cast(f16).load().to(f32)
    words = qs.cast(u32).load(vector=4)
    fifth = qh.cast(u32).load()
    runs = []
    for high in range(2):
        quants = []
        for i, word in enumerate(words):
            # bits 4i to 4i + 3 of this half of qh, each to bit 4 of a byte of its own
            four = (fifth >> (16 * high + 4 * i)) & 0xF
            spread = (four * 0x00204081) & 0x01010101  # bit j to bit 8j: copies 7 bits apart do not meet
            quants.append(((word >> 4 * high) & 0x0F0F0F0F) | (spread << 4))
        runs.append(Run(16 * high, [scale * (v - 16.0) for v in byte_floats(k, quants)]))
    return runs
