"""IQ3_XXS: 256 weights in 98 bytes; weight = d / 4 * (2 * scale + 1) * signed magnitude.

Source: ggml, `block_iq3_xxs`. Each 4 weights have a codebook index, a byte of `qs`. Each 32 have a
u32 with four times seven signs (see `groups_of_eight.even_signs`) and a scale in the top four bits.
"""

from __future__ import annotations

from typing import Any

from .unpack.groups_of_eight import Get, Numbers, code_book_format, even_signs


def _numbers(get: Get, i: Any) -> Numbers:
    both = get("qs", i * 2, 2)
    word = get("signs", (i >> 2) * 4, 4)
    signs = even_signs((word >> ((i & 3) * 7)) & 127)
    return Numbers((both & 255, both >> 8), word >> 28, signs)


FORMAT = code_book_format(
    _numbers,
    lambda get: get("d", 0, 2),
    name="IQ3_XXS",
    unit=1 / 4,
    struct=(("d", 2), ("qs", 64), ("signs", 32)),
    layout=(("qs", ("qs",)), ("signs", ("signs",)), ("d", ("d",))),
    quant_bits=3,
)
