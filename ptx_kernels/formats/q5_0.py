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
from .unpack import DecodedRun, byte_floats


def quants(field: Mapping[str, Any], xp: Any) -> Any:
    """The fields qs and qh -> float32 (..., 32) of 0 to 31; Q5_1's lie so too."""
    fifth = bits(field["qh"][..., None], 8, 1, xp)  # (..., 4, 8, 1)
    return (nibbles(field["qs"], xp) | (fifth.reshape(*field["qh"].shape[:-1], 32) << 4)).astype(np.float32)


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    return half(field["d"]) * (quants(field, xp) - np.float32(16))


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


def unpack_quants(k: Builder, qs: Pointer, qh: Pointer) -> list[list[Value]]:
    """All quants of a block, weights 0 to 15 and 16 to 31, as f32 of 0 to 31; Q5_1's too."""
    words = qs.cast(u32).load(vector=4)
    fifth = qh.cast(u32).load()
    halves = []
    for high in range(2):
        joined = []
        for i, word in enumerate(words):
            # bits 4i to 4i + 3 of this half of qh, each to bit 4 of a byte of its own
            four = (fifth >> (16 * high + 4 * i)) & 0xF
            spread = (four * 0x00204081) & 0x01010101  # bit j to bit 8j: copies 7 bits apart do not meet
            joined.append(((word >> 4 * high) & 0x0F0F0F0F) | (spread << 4))
        halves.append(byte_floats(k, joined))
    return halves


def unpack(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DecodedRun]:
    """All 32 weights of a block (see `unpack.Unpack`)."""
    qs, qh, d = planes
    scale = d.cast(f16).load().to(f32)
    return [
        DecodedRun(16 * i, [scale * (v - 16.0) for v in values]) for i, values in enumerate(unpack_quants(k, qs, qh))
    ]
