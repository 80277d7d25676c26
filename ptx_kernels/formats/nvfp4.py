"""NVFP4: 64 weights in 36 bytes; weight = scale[i // 16] / 2 * TABLE[code] with MXFP4's table.

Source: ggml, `block_nvfp4`; NVIDIA, "Pretraining LLMs with NVFP4", 2025. A scale is fp8 e4m3
without a sign; 0x7f counts as 0. Each 16 weights have 8 bytes of codes: low nibbles, then high
ones. A file may also hold a factor for the whole tensor, which is not part of the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..ptx import Builder, Value, f32
from .base import nibbles
from .mxfp4 import TABLE
from .unpack.groups_of_eight import Get, Reader, block_format
from .unpack.packed_words import Words, looked_up


def _scales() -> np.ndarray:
    """Returns half the value of each possible scale byte, float32 (256,); ignores the top bit."""
    code = np.arange(256) & 127
    exponent, mantissa = code >> 3, code & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 11.0)
    halves = np.where(exponent == 0, mantissa * 2.0**-10, normal)
    return np.where(np.arange(256) == 127, 0, halves).astype(np.float32)


#: Half the value of each scale byte, float32 (256,).
SCALES = _scales()


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    codes = field["qs"].reshape(*field["qs"].shape[:-1], 4, 8)
    entries = xp.asarray(np.array(TABLE, np.float32))[nibbles(codes, xp)]
    values = xp.asarray(SCALES)[field["d"]][..., None] * entries
    return values.reshape(*values.shape[:-2], 64)


def _load(k: Builder, get: Get, i: Value) -> tuple[list[Value], Value, Value]:
    at = (i >> 1) * 8
    return [get("codes", at, 4), get("codes", at + 4, 4)], get("scales", i >> 1, 1), i & 1


def _unpack(k: Builder, loaded: tuple[list[Value], Value, Value]) -> tuple[Words, Value]:
    words, code, high = loaded
    low, _ = looked_up(k, TABLE, [word >> (high * 4) for word in words])
    # moved to an f32's exponent and mantissa; the bias becomes 127 instead of 7, also for
    # subnormals
    scale = ((code & 127) << 20).bits(f32) * 2.0**119
    return low, k.select(code == 127, k.const(f32, 0.0), scale)


FORMAT = block_format(
    Reader(("codes", "scales"), _load, _unpack, lambda get: None, lambda k, _: k.const(f32, 1.0)),
    name="NVFP4",
    block_size=64,
    struct=(("d", 4), ("qs", 32)),
    layout=(("codes", ("qs",)), ("scales", ("d",))),
    f16_fields=(),
    weights=_weights,
    quant_bits=4,
)
