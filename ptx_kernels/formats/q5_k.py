"""Q5_K: 256 weights in 176 bytes; weight = d * scale[s] * q - dmin * min[s], sub-blocks s of 32.

Source: ggml, `block_q5_K`. `qs` as in Q4_K holds the low four bits; bit s of `qh[j]` is the fifth bit
of weight 32s + j.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..ptx import Builder, Pointer, Value, u32
from . import k_scales, q4_k
from .base import BlockFormat, bits
from .unpack import Run


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    return k_scales.weights(field, q4_k.low_bits(field["qs"], xp) | (bits(field["qh"], 8, 1, xp) << 4), xp)


FORMAT = BlockFormat(
    name="Q5_K",
    block_size=256,
    block_bytes=176,
    struct=(("d", 2), ("dmin", 2), ("scales", 12), ("qh", 32), ("qs", 128)),
    layout=(("block", ("d", "dmin", "scales", "qh", "qs")),),  # 176 = 11 * 16: aligned as it lies
    half_fields=("d", "dmin"),
    weights=_weights,
)


PARTS = q4_k.PARTS


def unpack(k: Builder, planes: Sequence[Pointer], part: Value) -> list[Run]:
    """32 weights of a block, the same ones as Q4_K's (see `unpack.Unpack`)."""
    fifth_bits = planes[0].cast(u32).at((part & 1) * 4).load(4, vector=4)
    return q4_k.unpack(k, planes, part, high_bits=fifth_bits, quants_at=48)
