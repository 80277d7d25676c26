"""TQ2_0: 256 weights in 66 bytes; weight = d * (q - 1), q of 0 to 2 in two bits.

Source: ggml, `block_tq2_0`. Quants are stored as described in `two_bits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..ptx import Builder, Value
from .base import f16_array
from .unpack import two_bits
from .unpack.groups_of_eight import Get, Reader, block_format, f16_factor, less_one
from .unpack.packed_words import Words


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    return f16_array(field["d"]) * (two_bits.quants(field["qs"], xp).astype(np.float32) - 1)


def _load(k: Builder, get: Get, i: Value) -> list[Value]:
    at = (i >> 4) * 32 + (i & 3) * 8
    return [(get("pairs", at + byte, 4) >> ((i >> 1) & 6)) & 0x03030303 for byte in (0, 4)]


def _unpack(k: Builder, words: Words) -> tuple[Words, None]:
    return less_one(words), None


FORMAT = block_format(
    Reader(("pairs", "d"), _load, _unpack, lambda get: get("d", 0, 2), f16_factor),
    name="TQ2_0",
    struct=(("qs", 64), ("d", 2)),
    layout=(("pairs", ("qs",)), ("d", ("d",))),  # the plane names distinguish it from IQ2_XXS
    f16_fields=("d",),
    weights=_weights,
    quant_bits=2,
)
