"""IQ2_S: 256 weights in 82 bytes; weight = d / 8 * (2 * scale + 1) * signed magnitude.

Source: ggml, `block_iq2_s`. Each 8 weights have the low eight bits of a codebook index in the first
half of `qs`, their signs in the second half, and two more index bits in `qh`. Each 16 weights have
a scale of four bits, low ones first.
"""

from __future__ import annotations

from typing import Any

from .unpack.groups_of_eight import Get, Numbers, code_book_format


def _numbers(get: Get, i: Any) -> Numbers:
    high = (get("qh", i >> 2, 1) >> ((i & 3) * 2)) & 3
    scale = (get("scales", i >> 2, 1) >> ((i & 2) * 2)) & 15
    return Numbers((get("qs", i, 1) | (high << 8),), scale, get("qs", i + 32, 1))


FORMAT = code_book_format(
    _numbers,
    lambda get: get("d", 0, 2),
    name="IQ2_S",
    unit=1 / 8,
    struct=(("d", 2), ("qs", 64), ("qh", 8), ("scales", 8)),
    layout=(("qs", ("qs",)), ("qh", ("qh",)), ("scales", ("scales",)), ("d", ("d",))),
    quant_bits=2,
)
