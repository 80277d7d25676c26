"""IQ3_S: 256 weights in 110 bytes; weight = d * (2 * scale + 1) * signed magnitude.

Source: ggml, `block_iq3_s`. Each 4 weights have the low eight bits of a codebook index in `qs` and
the ninth in `qh`. Each 32 have a scale of four bits, low ones first.
"""

from __future__ import annotations

from typing import Any

from .unpack.groups_of_eight import Get, Numbers, code_book_format


def _numbers(get: Get, i: Any) -> Numbers:
    both = get("qs", i * 2, 2)
    high = get("heads", i >> 2, 1) >> ((i & 3) * 2)
    scale = (get("heads", (i >> 3) + 8, 1) >> (i & 4)) & 15
    entries = (both & 255) | ((high & 1) << 8), (both >> 8) | ((high & 2) << 7)
    return Numbers(entries, scale, get("signs", i, 1))


FORMAT = code_book_format(
    _numbers,
    lambda get: get("d", 0, 2),
    name="IQ3_S",
    unit=1.0,
    struct=(("d", 2), ("qs", 64), ("qh", 8), ("signs", 32), ("scales", 4)),
    layout=(("qs", ("qs",)), ("signs", ("signs",)), ("heads", ("qh", "scales")), ("d", ("d",))),
    quant_bits=3,
)
