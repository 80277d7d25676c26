"""TQ1_0: 256 weights in 54 bytes; weight = d * (q - 1), five quants q of 0 to 2 per byte.

Source: ggml, `block_tq1_0`. A byte is a fraction of 256 whose base-3 digits are quants: digit n of
byte b is 3 * (b * 3^n % 256) / 256. The weights are digit 0 of 32 bytes, then digits 1 to 4 of
them; then the same of the next 16 bytes; then digits 0 to 3 of the last 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..ptx import Builder, Value, u32
from .base import f16_array
from .unpack.groups_of_eight import Get, Reader, block_format, f16_factor, less_one
from .unpack.packed_words import Words

_POWERS = (1, 3, 9, 27, 81)


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    parts = [(field["qs"][..., :32], 5), (field["qs"][..., 32:], 5), (field["qh"], 4)]
    digits = []
    for data, count in parts:
        powers = np.array(_POWERS[:count], np.uint8)[:, None]
        shifted = (data[..., None, :] * powers).astype(np.uint16)  # modulo 256 in uint8
        digits.append((shifted * 3 >> 8).reshape(*data.shape[:-1], -1))
    quants = xp.concatenate(digits, axis=-1).astype(np.float32)
    return f16_array(field["d"]) * (quants - 1)


def _load(k: Builder, get: Get, i: Value) -> tuple[list[Value], list[Value]]:
    """Loads two words of four bytes; returns them, and which base-3 digit to use of each word."""
    first, second = i < 20, i < 30
    after = i - 20
    digit = k.select(first, i >> 2, k.select(second, after >> 1, (i - 30) * 2))
    at = k.select(first, (i & 3) * 8, k.select(second, (after & 1) * 8 + 32, k.const(u32, 48)))
    further = k.select(second, k.const(u32, 4), 0)  # for the last four bytes, the same word twice
    words = [get("qs", at, 4), get("qs", at + further, 4)]
    return words, [digit, digit + k.select(second, k.const(u32, 0), 1)]


def _unpack(k: Builder, loaded: tuple[list[Value], list[Value]]) -> tuple[Words, None]:
    found = []
    for word, digit in zip(*loaded, strict=True):
        power = k.permute(k.const(u32, 0x1B090301), k.const(u32, 81), digit) & 255
        # even and odd bytes, each with room for a product
        halves = [(((word >> shift) & 0x00FF00FF) * power) & 0x00FF00FF for shift in (0, 8)]
        even, odd = ((half * 3 >> 8) & 0x00FF00FF for half in halves)
        found.append(even | (odd << 8))
    return less_one(found), None


FORMAT = block_format(
    Reader(("qs", "d"), _load, _unpack, lambda get: get("d", 0, 2), f16_factor),
    name="TQ1_0",
    struct=(("qs", 48), ("qh", 4), ("d", 2)),
    layout=(("qs", ("qs", "qh")), ("d", ("d",))),
    f16_fields=("d",),
    weights=_weights,
    quant_bits=2,
)
