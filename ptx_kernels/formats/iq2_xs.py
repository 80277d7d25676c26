"""IQ2_XS: 256 weights in 74 bytes; weight = d / 8 * (2 * scale + 1) * signed magnitude.

Source: ggml, `block_iq2_xs`. Each 8 weights have 16 bits: a codebook index of nine bits and seven
signs (see `groups_of_eight.even_signs`). Each 16 weights have a scale of four bits, low ones first.
"""

from __future__ import annotations

from typing import Any

from .unpack.groups_of_eight import Get, Numbers, code_book_format, even_signs


def _numbers(get: Get, i: Any) -> Numbers:
    word = get("qs", i * 2, 2)
    scale = (get("scales", i >> 2, 1) >> ((i & 2) * 2)) & 15
    return Numbers((word & 511,), scale, even_signs(word >> 9))


FORMAT = code_book_format(
    _numbers,
    lambda get: get("d", 0, 2),
    name="IQ2_XS",
    unit=1 / 8,
    struct=(("d", 2), ("qs", 64), ("scales", 8)),
    layout=(("qs", ("qs",)), ("scales", ("scales",)), ("d", ("d",))),
    quant_bits=2,
)
