"""IQ1_S: 256 weights in 50 bytes; weight = d * (2 * scale + 1) * (entry +- 1 / 8).

Source: ggml, `block_iq1_s`. Each 8 weights have the low eight bits of a codebook index in `qs`.
Each 32 have 16 bits of `qh`: the upper three bits of four indices, three bits of the scale, and the
sign of the eighth.
"""

from __future__ import annotations

from typing import Any

from .unpack.groups_of_eight import Get, Numbers, code_book_format


def _numbers(get: Get, i: Any) -> Numbers:
    word = get("qh", (i >> 2) * 2, 2)
    entry = get("qs", i, 1) | (((word >> ((i & 3) * 3)) & 7) << 8)
    return Numbers((entry,), (word >> 12) & 7, lowered=word >> 15)


FORMAT = code_book_format(
    _numbers,
    lambda get: get("d", 0, 2),
    name="IQ1_S",
    unit=1.0,
    struct=(("d", 2), ("qs", 32), ("qh", 16)),
    layout=(("qs", ("qs",)), ("qh", ("qh",)), ("d", ("d",))),
    quant_bits=1,
    raised=True,
)
