"""IQ2_XXS: 256 weights in 66 bytes; weight = d / 8 * (2 * scale + 1) * signed magnitude.

Source: ggml, `block_iq2_xxs`. Each 32 weights have 8 bytes: four codebook indices, then a u32 with
four times seven signs (see `groups_of_eight.even_signs`) and a scale in the top four bits.
"""

from __future__ import annotations

from typing import Any

from .unpack.groups_of_eight import Get, Numbers, code_book_format, even_signs


def _numbers(get: Get, i: Any) -> Numbers:
    group = (i >> 2) * 8
    word = get("qs", group + 4, 4)
    signs = even_signs((word >> ((i & 3) * 7)) & 127)
    return Numbers((get("qs", group + (i & 3), 1),), word >> 28, signs)


FORMAT = code_book_format(
    _numbers,
    lambda get: get("d", 0, 2),
    name="IQ2_XXS",
    unit=1 / 8,
    struct=(("d", 2), ("qs", 64)),
    layout=(("qs", ("qs",)), ("d", ("d",))),
    quant_bits=2,
)
